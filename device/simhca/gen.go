package simhca

//go:generate go tool stringer -type Verb,Step,Status,Opcode -linecomment -output enum_string.go
