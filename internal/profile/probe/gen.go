package probe

// The objects are built by Debian 12's clang 14; a newer one makes other bytes.
// They hold no path: bpf2go strips the debug information, all but the BTF.
//
//go:generate go tool bpf2go -tags linux -target amd64,arm64 -no-global-types -output-stem program -cflags "-O2 -g -Wall -Werror -mcpu=v3" program src/profile.c
