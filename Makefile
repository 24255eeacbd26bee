# Two kinds of target. Checks never write into the tree; writers say so.
# `make help` prints the comments behind the ## signs.

GO       ?= go
TOOL     := GO='$(GO)' tools/tool
FUZZ     ?= .
FUZZTIME ?= 30s
PKG      ?= ./...
# Tells a benchmark its commit: the go command does not when it runs a program.
STAMP     = -ldflags '-X github.com/tensorferry/tensorferry/internal/harness.commit=$(shell git describe --always --dirty 2>/dev/null)'

# What `breaking`, `old-new` and `bench-against` compare with: the last release, or, before
# there is one, the first commit that has sets. `make breaking AGAINST=main` on a branch of
# several commits. bench-against builds its own program over the older commit, so the API has
# to be the same as far as that uses it.
AGAINST ?= $(or $(shell git describe --tags --abbrev=0 2>/dev/null),8b34dfe257cb54d210b741ea148c4039ceb3090f)

# The Python of the benchmarks, and the same with the package of this tree.
PEERS_PYTHON = p=$$PWD/$$(tools/python-env bench bench/python/requirements.txt) && cd bench && set -x
BENCH_PYTHON = p=$$(tools/python-env bench bench/python/requirements.txt) && \
	$$p -m pip --quiet install --force-reinstall --no-deps --no-index "$$(tools/wheel .cache/wheel | tail -n 1)" && set -x
# What is linted, from python/.
PYTHON_LINTED := . ../examples/python ../bench/python ../bench/training ../bench/dropins ../tools/gpu-day
# Debian's Python, for torch, if it has it.
TORCH_PYTHON = $(shell /usr/bin/python3 -c 'import torch; print("--torch-python /usr/bin/python3")' 2>/dev/null)
TRAINING_PYTHON = $(if $(TORCH_PYTHON),/usr/bin/python3,python3)

# A program that hangs shall fail a check, not hold it up.
LIMIT := $(if $(shell command -v timeout),timeout 300)

.DEFAULT_GOAL := check
.PHONY: help check checks nightly test race nocgo cuda ptxas cuda-mutants gpu-build gpu-day lint lint-go lint-proto breaking generated tidy-check \
	examples grpcurl-check old-new bench-smoke demo bench bench-memory floods bench-calls bench-peers bench-roads bench-against bench-load build \
	wheel wheel-arm64 python python-examples lint-python bench-python bench-python-memory bench-training bench-dropins stress-python stress-python-smoke \
	stress-lanes stress-sessions stress-receive stress-crash stress-restarts stress-soak stress-smoke schedules fuzz fuzz-1m generate reference packages kernels fmt vectors scripts-rewrite bench-peers-results states-rewrite

help: ## Print this list
	@awk -F ':.*## ' '/^##/ { printf "\n%s\n", substr($$0, 4) } /^[a-z0-9-]+:.*## / { printf "  %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

## Run it

demo: ## Run a split network over a real socket and compare with torch's predictions
	$(GO) run ./cmd/tensorferry demo

bench: ## Measure upload, echo, relu, small calls, push and pull beside raw sockets and stock gRPC
	cd bench && $(GO) run $(STAMP) . -machine

bench-memory: ## Measure the peak memory of server and client for a tensor of 16 GiB
	$(GO) run ./cmd/tensorferry bench --memory

floods: ## Every flood of a server, and 200 sessions that end while their results are on the way
	$(GO) test ./server -count=1 -run 'TestAHealthyClientIsServedThroughAFlood|TestEveryChunkThatAPeerReads' -flood.all -endings 200

bench-peers: ## Measure upload and echo beside Arrow Flight in C++ and Go, gRPC and raw sockets
	@$(PEERS_PYTHON) && $(GO) run $(STAMP) . -python $$p

bench-calls: ## Measure small calls and steps as users write them beside unary and stream gRPC, quiet and with every core busy
	cd bench && $(GO) run $(STAMP) . -calls 512,8192,30000 -rounds 25 && $(GO) run $(STAMP) . -calls 512,8192,30000 -rounds 25 -busy

bench-roads: ## Measure over links of 50 and 100 ms between two network namespaces, beside iperf3, raw sockets, gRPC and Flight
	@$(PEERS_PYTHON) && $(GO) run $(STAMP) ./roads -python $$p

bench-python: ## Measure the Python client beside Go's, unary and stream grpcio, Arrow Flight in C++ and torch.distributed.rpc
	@$(BENCH_PYTHON) && GO='$(GO)' $$p bench/python/bench.py $(TORCH_PYTHON)

bench-training: ## Measure the training of a torch module of a server beside the unsplit one and torch.distributed.rpc
	GO='$(GO)' $(TRAINING_PYTHON) bench/training/bench.py

bench-dropins: ## Measure the services for clients of kpu.torch and SplitLearnComm beside least servers in Python
	@$(BENCH_PYTHON) && $(TRAINING_PYTHON) bench/dropins/bench.py --go '$(GO)' --grpc $$p

bench-python-memory: ## Measure the peak memory of 16 GiB from a Python generator through relu into a file
	@$(BENCH_PYTHON) && $$p bench/python/memory.py

bench-against: ## Measure AGAINST and this tree in turns, beside raw sockets
	cd bench && $(GO) run $(STAMP) . -against '$(AGAINST)'

bench-load: ## Measure 1 to 16 connections with 1 to 64 calls in flight, AGAINST and this tree in turns
	cd bench && $(GO) run $(STAMP) . -load -against '$(AGAINST)'

stress-sessions: ## Hold a server to its memory with 1 000 sessions at work and 10 000 idle ones
	cd stress && $(GO) run $(STAMP) . sessions

stress-receive: ## Hold a server to its memory while peers send what nobody consumes and read nothing
	cd stress && $(GO) run $(STAMP) . receive

stress-crash: ## Kill servers during pushes and sets, and clients during sets and pulls, 200 of each
	cd stress && $(GO) run $(STAMP) . crash

stress-restarts: ## End and start a server 200 times under 16 clients with retries
	cd stress && $(GO) run $(STAMP) . restarts

stress-lanes: ## Cut, stall, slow and damage 2 000 lanes, of 1 to 16 in a session, plain and in TLS, or drain, half-close and revoke their sessions, under load; then 300 with the race detector
	$(GO) test -tags invariants -timeout 30m ./client -count=1 -v -run TestFaultsOfLanes -lane.faults 2000
	$(GO) test -tags invariants -timeout 30m -race ./client -count=1 -v -run TestFaultsOfLanes -lane.faults 300

stress-soak: ## Put mixed load on two servers for 20 minutes, and see whether anything grows
	cd stress && $(GO) run $(STAMP) . soak

stress-python: ## Kill workers, clients and programs by the hundred, and 40 threads for a minute, in Python
	@set -e; for part in worker-kills client-kills program-kills threads tasks training-faults training-sessions training-steps; do tools/python-stress $$part; done

build: ## Build bin/tensorferry, with the CUDA engine where there is a C compiler
	$(GO) build -trimpath -tags grpcnotrace -o bin/tensorferry ./cmd/tensorferry
	@if [ "$$($(GO) env CGO_ENABLED)" = 1 ]; then echo "built with cgo: CUDA devices can be used"; else echo "built without cgo: no CUDA devices"; fi

wheel: ## Build python/dist/*.whl: the Python package with the program in it
	tools/wheel python/dist

wheel-arm64: ## The same for arm64, with a static program
	tools/wheel python/dist arm64

## Check (nothing in the tree is written)

# old-new is part of it when the wire contract differs from that of AGAINST.
CHECKS = test race nocgo cuda ptxas lint generated tidy-check examples grpcurl-check \
	$(shell git diff --quiet '$(AGAINST)' -- api testdata/vectors 2>/dev/null || echo old-new) \
	bench-smoke stress-smoke python python-examples lint-python

# What takes longer than somebody waits for.
NIGHTLY := old-new schedules floods stress-lanes stress-sessions stress-receive stress-crash stress-restarts stress-soak stress-python cuda-mutants fuzz

check: $(CHECKS) ## All of it, as CI does (default)

checks: ## Name what check consists of
	@echo $(CHECKS)

nightly: $(NIGHTLY) ## What takes hours: old-new, random schedules, floods, every stress at full length, the mutants, 30 s of each fuzz target

# Some tests wait, so more packages than processors are tested at a time. No package takes a third of
# the time that -timeout allows; one whose tests hang shows their stacks then. Vet is left to lint. The tag
# is that of build, whose program a test measures.
test: ## Every test, the committed fuzz corpora included; needs Go only
	$(GO) test -p 4 -vet=off -tags grpcnotrace -timeout 6m ./...

# The benchmarks are asked for behind -args, because with -bench of its own the go command tests one package
# after the other. Vet is left to lint, which reads this build.
race: ## Every test under the race detector with the invariant checks built in, and every Go benchmark once
	$(GO) test -p 4 -vet=off -race -tags invariants -timeout 20m ./... -args -test.bench . -test.benchtime 1x

# What differs without cgo: the CUDA engine is absent from whoever offers it, and memory is mapped and processes
# start and end without a C library.
nocgo: ## Build and vet everything without cgo, and test what differs
	CGO_ENABLED=0 $(GO) build ./...
	CGO_ENABLED=0 $(GO) vet ./...
	CGO_ENABLED=0 $(GO) test ./engine/cuda ./internal/cli/... ./cmd/tensorferry ./internal/proc ./slab

cuda: ## The CUDA engine over a fake driver, and its C under the address sanitizer; needs g++, no GPU
	$(GO) test ./engine/cuda/...
	$(GO) test -count 1 ./engine/cuda/fakecuda -run AddressSanitizer -sanitize
	$(GO) test -asan ./engine/cuda -run 'ReLUAndAffine|StackModelComputes|Fault|Lost|Hangs'

ptxas: ## Assemble the PTX that ships for three GPUs with NVIDIA's assembler, of a PyPI wheel
	@p=$$(tools/python-env ptxas engine/cuda/kernels/requirements.txt) && \
	a=$$($$p -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cuda_nvcc/bin/ptxas && cd engine/cuda/kernels && set -ex && \
	for gpu in sm_75 sm_80 sm_90; do $$a -arch=$$gpu -o /dev/null sm_75.ptx; done && for gpu in sm_80 sm_90; do $$a -arch=$$gpu -o /dev/null sm_80.ptx; done

cuda-mutants: ## Break the CUDA engine in one place at a time, and see that the tests notice
	$(GO) test -count 1 -timeout 60m ./engine/cuda -run EveryMutant -mutants -v

python: ## Build the wheel, and run the Python tests with it in an empty environment, and with numpy and torch if they are here
	tools/python-check

python-examples: ## Run every program in examples/python to its end
	tools/python-examples

lint-python: ## ruff and mypy
	p=$$(tools/python-env lint python/requirements-lint.txt) && set -x && cd python && \
		../$$p -m ruff check --no-cache --config pyproject.toml $(PYTHON_LINTED) && ../$$p -m ruff format --no-cache --check --config pyproject.toml $(PYTHON_LINTED) && ../$$p -m mypy --cache-dir=/dev/null

lint: lint-go lint-proto breaking ## Everything that reads the source without running it

lint-go: ## golangci-lint of all modules, which vets, and checks the formatting; make nocgo vets the build without invariants
	$(TOOL) golangci-lint run ./...
	cd bench && GO='$(GO)' ../tools/tool golangci-lint run ./...
	cd stress && GO='$(GO)' ../tools/tool golangci-lint run ./...

lint-proto: ## buf's lint and formatting of the wire contract
	$(TOOL) buf lint
	$(TOOL) buf format --diff --exit-code

breaking: ## Check that the wire contract is compatible with AGAINST
	$(TOOL) buf breaking api --against '.git#ref=$(AGAINST),subdir=api'

old-new: ## Clients and servers of AGAINST with those of this tree
	cd stress && $(GO) test . -count=1 -v -timeout 20m -run OldAndNew -against '$(AGAINST)'

generated: ## The committed generated code is what the .proto files generate
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && set -x && \
		$(TOOL) buf generate -o "$$tmp" && diff -r -x '*.proto' api "$$tmp/api"

tidy-check: ## go.mod and go.sum say what is imported
	$(GO) mod tidy -diff
	cd tools && $(GO) mod tidy -diff
	cd bench && $(GO) mod tidy -diff
	cd stress && $(GO) mod tidy -diff

examples: ## Run every program below examples/ to its end, but relu, which has a test of its own
	@set -e; for p in $$($(GO) list -f '{{if eq .Name "main"}}{{.ImportPath}}{{end}}' ./examples/... | grep -v /relu$$); do \
		echo "$(GO) run $$p"; $(LIMIT) $(GO) run $$p </dev/null; done

grpcurl-check: ## List, describe and call a server with grpcurl, and what it prints
	GO='$(GO)' ./tools/grpcurl-check

bench-smoke: ## Test the benchmarks, and run every part of each briefly, in Python where there is torch
	cd bench && $(GO) test ./...
	$(GO) run ./cmd/tensorferry bench --quick --net both
	$(GO) run ./cmd/tensorferry bench --quick --memory
	@$(PEERS_PYTHON) && $(GO) run . -quick -machine && $(GO) run . -quick -busy -calls 512,30000 && $(GO) run . -quick -python $$p && $(GO) run . -quick -against '$(AGAINST)' && \
		$(GO) run ./roads -quick -python $$p
	@$(BENCH_PYTHON) && GO='$(GO)' $$p bench/python/bench.py --quick $(TORCH_PYTHON) && $$p bench/python/memory.py --quick && \
		GO='$(GO)' $(TRAINING_PYTHON) bench/training/bench.py --quick && $(TRAINING_PYTHON) bench/dropins/bench.py --go '$(GO)' --grpc $$p --quick

stress-python-smoke: ## Run each of the Python stress program's parts briefly
	tools/python-stress smoke

stress-smoke: ## Test the stress programs, and kill servers and clients, five of each
	cd stress && $(GO) test ./...
	cd stress && $(GO) run . crash -n 5

fuzz: ## Fuzz each target for FUZZTIME=30s (FUZZ=regexp and PKG=./path choose)
	@$(GO) test -list '^Fuzz' $(PKG) >/dev/null # a package that does not build shall fail here
	@set -e; $(GO) test -list '^Fuzz' $(PKG) | awk '/^Fuzz/ { t[n++] = $$1 } /^ok/ { for (i = 0; i < n; i++) print t[i], $$2; n = 0 }' | \
		grep -E -- '$(FUZZ)' | while read -r target pkg; do \
		(set -x; $(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 20x "$$pkg"); done

schedules: ## Run a million random schedules of sessions, and 20 000 of connections that wait
	$(GO) test -tags invariants ./stream -count=1 -timeout 60m -run RandomSchedules -schedules 1000000
	$(GO) test -tags invariants ./internal/inbound -count=1 -timeout 60m -run PausedConnections -schedules 20000

fuzz-1m: ## Fuzz each target for a million executions
	@$(MAKE) --no-print-directory fuzz FUZZTIME=1000000x

## Write

generate: ## Rewrite the Go code of the wire contract
	$(TOOL) buf generate

reference: ## Rewrite docs/commands.md from the commands, and the table of docs/errors.md
	$(GO) test ./cmd/tensorferry -run Reference -rewrite

packages: ## Rewrite the table of docs/packages.md from the packages, and lower the ceiling of internal/house
	$(GO) test -tags grpcnotrace ./internal/house -run 'PageOfPackages|Ceiling' -rewrite

gpu-build: ## Build what a machine with a GPU needs for make gpu-day, into .gpu-day
	GO='$(GO)' tools/gpu-day/day build

gpu-day: ## On a machine with a GPU: test and measure what make gpu-build built there or elsewhere
	tools/gpu-day/day run

kernels: ## Rewrite the PTX of engine/cuda/kernels with clang-19
	$(GO) test ./engine/cuda/kernels -run WhatTheCompilerMakes -rewrite

fmt: ## Rewrite Go and proto files in the house format
	$(TOOL) golangci-lint fmt ./...
	$(TOOL) buf format --write

vectors: ## Rewrite testdata/vectors; a changed byte needs a Wire line in CHANGELOG.md
	$(GO) test ./internal/wire -run Vectors -vectors

scripts-rewrite: ## Accept what the session scripts print now; read the diff
	$(GO) test ./stream -run Scripts -rewrite

states-rewrite: ## Draw the states of a call in docs/wire.md from their tables
	$(GO) test ./internal/lifecycle -run StateDiagrams -rewrite

bench-peers-results: ## Measure as bench-peers does and rewrite docs/bench/peers.*: table and samples
	@$(PEERS_PYTHON) && $(GO) run $(STAMP) . -python $$p -out ../docs/bench
