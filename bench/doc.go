// Bench runs pindown's benchmark beside other caches, in one process, in turn:
//
//	make bench-peers
//
// from the top of the repository, or here "go run . --help".
//
// It is a module of its own because it uses cgo, to link UCX's registration
// cache; pindown itself doesn't.
package main
