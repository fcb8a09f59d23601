// Package symbols names the functions of addresses in ELF files: from the line
// table that every Go program has, and from symbol tables.
package symbols

import (
	"bytes"
	"debug/elf"
	"debug/gosym"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"
)

// File is an executable or a library. It isn't safe for concurrent use.
type File struct {
	elf     *elf.File
	symbols []symbol
	lines   *gosym.Table // nil if it isn't Go
}

type symbol struct {
	start, size uint64
	name        string
}

// Open reads the symbols of an ELF file; r must stay open. A file without
// symbols is no error.
func Open(r io.ReaderAt) (_ *File, err error) {
	defer func() {
		// The decoders of debug/elf and debug/gosym are known to panic on some
		// damaged files.
		if p := recover(); p != nil {
			err = fmt.Errorf("read symbols: %v", p)
		}
	}()
	e, err := elf.NewFile(r)
	if err != nil {
		return nil, fmt.Errorf("read symbols: %w", err)
	}
	f := &File{elf: e}
	f.readLines()
	if f.lines == nil {
		if err := f.readSymbols(); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// readLines reads the line table of a Go program.
func (f *File) readLines() {
	section, text := f.elf.Section(".gopclntab"), f.elf.Section(".text")
	if section == nil || text == nil {
		return
	}
	start, ok := f.textStart(section.Addr, text)
	if !ok {
		return
	}
	data, err := section.Data()
	if err != nil {
		return
	}
	if table, err := gosym.NewTable(nil, gosym.NewLineTable(data, start)); err == nil && len(table.Funcs) > 0 {
		f.lines = table
	}
}

// textStart returns the address that those of the line table count from: that
// of the symbol runtime.text. It isn't always where the section begins: a
// program that is linked with others' code has that first. Without symbols the
// program's own description of itself (runtime.moduledata) has it. It begins
// with the address of the line table.
func (f *File) textStart(lines uint64, text *elf.Section) (uint64, bool) {
	if start, ok := f.symbol("runtime.text"); ok {
		return start, true
	}
	const (
		word = 8
		// Words of runtime.moduledata, since Go 1.18.
		minPC, textAt, textEnd = 20, 22, 23
	)
	for _, name := range []string{".go.module", ".noptrdata", ".data"} {
		section := f.elf.Section(name)
		if section == nil {
			continue
		}
		data, err := section.Data()
		if err != nil {
			continue
		}
		for at := 0; at+word*(textEnd+1) <= len(data); at += word {
			field := func(i int) uint64 { return f.elf.ByteOrder.Uint64(data[at+word*i:]) }
			if field(0) != lines {
				continue
			}
			start, end, first := field(textAt), field(textEnd), field(minPC)
			if start >= text.Addr && start <= first && first < end && end <= text.Addr+text.Size {
				return start, true
			}
		}
	}
	// A position-independent program's addresses aren't in the file.
	return 0, false
}

// symbol returns the value of a symbol of a 64-bit file. Programs have a hundred
// thousand: decoding all of them takes longer than all else here.
func (f *File) symbol(name string) (uint64, bool) {
	section := f.elf.SectionByType(elf.SHT_SYMTAB)
	if section == nil || f.elf.Class != elf.ELFCLASS64 || section.Link == 0 || int(section.Link) >= len(f.elf.Sections) {
		return 0, false
	}
	names, err := f.elf.Sections[section.Link].Data()
	if err != nil {
		return 0, false
	}
	at := bytes.Index(names, []byte("\x00"+name+"\x00"))
	if at < 0 {
		return 0, false
	}
	at++
	all, err := section.Data()
	if err != nil {
		return 0, false
	}
	const (
		size  = elf.Sym64Size
		value = 8 // the offset of st_value; that of st_name is 0
	)
	for ; len(all) >= size; all = all[size:] {
		if f.elf.ByteOrder.Uint32(all) == uint32(at) {
			return f.elf.ByteOrder.Uint64(all[value:]), true
		}
	}
	return 0, false
}

func (f *File) readSymbols() error {
	for _, read := range []func() ([]elf.Symbol, error){f.elf.Symbols, f.elf.DynamicSymbols} {
		all, err := read()
		if err != nil && !errors.Is(err, elf.ErrNoSymbols) {
			return fmt.Errorf("read symbols: %w", err)
		}
		for _, s := range all {
			t := elf.ST_TYPE(s.Info)
			if (t == elf.STT_FUNC || t == elf.STT_GNU_IFUNC) && s.Section != elf.SHN_UNDEF && s.Name != "" {
				f.symbols = append(f.symbols, symbol{s.Value, s.Size, s.Name})
			}
		}
	}
	// Of several names of one function the one that people write: without
	// leading underscores, short.
	slices.SortFunc(f.symbols, func(a, b symbol) int {
		switch {
		case a.start != b.start:
			if a.start < b.start {
				return -1
			}
			return 1
		case strings.HasPrefix(a.name, "_") != strings.HasPrefix(b.name, "_"):
			if strings.HasPrefix(b.name, "_") {
				return -1
			}
			return 1
		}
		return len(a.name) - len(b.name)
	})
	f.symbols = slices.CompactFunc(f.symbols, func(a, b symbol) bool { return a.start == b.start })
	return nil
}

// Address returns the virtual address in the file of an offset in it.
func (f *File) Address(offset uint64) (uint64, bool) {
	for _, p := range f.elf.Progs {
		if p.Type == elf.PT_LOAD && offset >= p.Off && offset < p.Off+p.Filesz {
			return offset - p.Off + p.Vaddr, true
		}
	}
	return 0, false
}

// Location is a place in a program. What isn't known is empty.
type Location struct {
	Function string
	Source   string
	Line     int
}

// Lookup names a virtual address of the file.
func (f *File) Lookup(addr uint64) (l Location) {
	if f.lines != nil {
		defer func() {
			if recover() != nil { // a damaged table
				l = Location{}
			}
		}()
		source, line, fn := f.lines.PCToLine(addr)
		if fn == nil {
			return Location{}
		}
		return Location{fn.Name, source, line}
	}
	i := sort.Search(len(f.symbols), func(i int) bool { return f.symbols[i].start > addr }) - 1
	// Functions in assembly may have no size: they end where the next begins.
	if i < 0 || f.symbols[i].size != 0 && addr >= f.symbols[i].start+f.symbols[i].size {
		return Location{}
	}
	return Location{Function: f.symbols[i].name}
}

// AfterCall reports whether the instruction before a virtual address is a call,
// as it is before every return address.
func (f *File) AfterCall(addr uint64) bool {
	const longest = 7
	var code [longest]byte
	if addr < longest || !f.read(code[:], addr-longest) {
		return false
	}
	switch f.elf.Machine {
	case elf.EM_X86_64:
		if code[2] == 0xe8 { // call rel32
			return true
		}
		for n := 2; n <= longest; n++ { // call r/m64: ff /2
			at := longest - n
			if code[at] == 0xff && code[at+1]>>3&7 == 2 {
				return true
			}
		}
		return false
	case elf.EM_AARCH64:
		insn := binary.LittleEndian.Uint32(code[longest-4:])
		return insn>>26 == 0x25 || insn&0xfffffc1f == 0xd63f0000 // bl, blr
	default:
		return false
	}
}

func (f *File) read(to []byte, addr uint64) bool {
	for _, p := range f.elf.Progs {
		if p.Type == elf.PT_LOAD && addr >= p.Vaddr && addr+uint64(len(to)) <= p.Vaddr+p.Filesz {
			_, err := p.ReadAt(to, int64(addr-p.Vaddr))
			return err == nil
		}
	}
	return false
}
