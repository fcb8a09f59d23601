# Everything that CI runs is a target here, so that a person can run it too.

GO        ?= go
FUZZTIME  ?= 5s
BIN       := bin
# The linter's cache is the checkout's own: it remembers paths, and exclusions by
# path would miss what another checkout has left there.
LINT      := GOLANGCI_LINT_CACHE=$(CURDIR)/$(BIN)/lint-cache $(GO) tool -modfile=$(CURDIR)/internal/tools/go.mod golangci-lint

# What the tests need beside Go. On a machine without apt-get or root, `make
# deps` prints the list and the tests that lack something skip (with CI=true
# they fail).
APT_MODEL    := spin gcc libc6-dev
APT_GENERATE := clang llvm
APT_PEERS    := libucx-dev gcc libc6-dev
APT_VERBS    := libibverbs-dev gcc libc6-dev
APT_VM       := qemu-system-x86 busybox-static e2fsprogs
APT_PROFILE  := strace gcc libc6-dev util-linux
APT_REPORT   := chromium
# Programs that `make profiles` runs if they are there.
APT_WORKLOAD := gcc libc6-dev python3 redis-server postgresql

.DEFAULT_GOAL := help

.PHONY: help
help: ## print this help
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build the command into bin/
	$(GO) build -o $(BIN)/pindown ./cmd/pindown

.PHONY: deps
deps: ## install what the tests need (apt packages; as root)
	@scripts/deps $(APT_MODEL) $(APT_GENERATE) $(APT_PEERS) $(APT_VERBS) $(APT_VM) $(APT_PROFILE) $(APT_REPORT)

.PHONY: test
test: deps nocgo race fuzz bench-smoke ## the whole test suite; ends with go test's own summary
	$(GO) test -count=1 -timeout 40m ./...

.PHONY: test-short
test-short: ## what needs neither privilege nor packages
	$(GO) test -short ./...

.PHONY: test-vm
test-vm: ## the VM tier alone: a Debian kernel under QEMU
	$(GO) test -count=1 -timeout 40m -v ./test/vm/...

.PHONY: race
race: ## the tests under the race detector
	$(GO) test -race -short -timeout 20m ./...

.PHONY: nocgo
nocgo: ## build and vet without cgo, for both architectures
	CGO_ENABLED=0 GOARCH=amd64 $(GO) build ./... && CGO_ENABLED=0 GOARCH=amd64 $(GO) vet ./...
	CGO_ENABLED=0 GOARCH=arm64 $(GO) build ./... && CGO_ENABLED=0 GOARCH=arm64 $(GO) vet ./...

.PHONY: fuzz
fuzz: ## each fuzz target for FUZZTIME (default 5s)
	@scripts/fuzz $(FUZZTIME)

.PHONY: soak
soak: ## the long soak test with the physical-page oracle (SOAK=operations, default 20000000)
	PINDOWN_SOAK=$(or $(SOAK),20000000) $(GO) test -count=1 -timeout 4h -v -run 'TestSoak' ./internal/soak

.PHONY: bench
bench: ## what the cache costs: pindown bench (BENCHFLAGS, see pindown bench --help)
	$(GO) run ./cmd/pindown bench $(BENCHFLAGS)

.PHONY: bench-go
bench-go: ## the packages' own benchmarks
	$(GO) test -run '^$$' -bench . ./...

.PHONY: bench-peers
bench-peers: ## pindown beside UCX's registration cache and others (BENCHFLAGS; needs libucx-dev)
	@scripts/deps $(APT_PEERS)
	@$(HAVE_PEERS) || { echo "bench-peers needs UCX's headers and a C compiler: sudo apt-get install $(APT_PEERS)" >&2; exit 1; }
	@mkdir -p $(BIN)
	cd bench && $(GO) run . --json $(CURDIR)/$(BIN)/bench-peers.json $(BENCHFLAGS)

# Whether bench/ can be built.
HAVE_PEERS = echo '\#include <ucs/memory/rcache.h>' | $${CC:-cc} -E - >/dev/null 2>&1

.PHONY: bench-smoke
bench-smoke: ## each benchmark once, so that none rots
	$(GO) test -short -run '^$$' -bench . -benchtime 1x ./...
	@if $(HAVE_PEERS); then cd bench && $(GO) vet ./... && $(GO) test -count=1 ./...; \
	else echo "bench/ is left out: it needs $(APT_PEERS)"; test "$$CI" != true; fi

.PHONY: profiles
profiles: ## measure docs/vm-activity.md anew: real programs, profiled and replayed (as root, about ten minutes)
	@scripts/deps $(APT_WORKLOAD)
	$(GO) run ./internal/workloads/profiles

.PHONY: lint
lint: ## linters and formatting
	$(LINT) run ./...
	@if $(HAVE_PEERS); then cd bench && $(LINT) run ./...; \
	else echo "bench/ is left out: it needs $(APT_PEERS)"; test "$$CI" != true; fi

.PHONY: fmt
fmt: ## format the code
	$(LINT) fmt ./...

.PHONY: generate
generate: ## generate code and BPF objects (needs clang and llvm)
	$(GO) generate ./...

.PHONY: generate-check
generate-check: generate ## fail if generated files are not fresh
	git diff --exit-code
	@test -z "$$(git status --porcelain)" || { git status --short; echo "generated files are not committed"; exit 1; }

.PHONY: check
check: deps lint generate-check test ## all that CI runs
