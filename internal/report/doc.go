// Package report writes HTML pages with plots that need nothing else: no
// network, no script, one file. The plots are SVG, drawn here, the same bytes
// for the same data.
//
// A [Page] has sections, a section has elements: text, tables and plots
// ([Lines], [Bars], [Flame], [Spans]). Names may come from anywhere (a recorded
// program, a damaged file): they are escaped, and what XML can't hold is
// replaced.
package report
