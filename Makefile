# make                        build the training programs, and the default data
# make train_gpt2_single      build one of them; then run ./train_gpt2_single
# make demo                   train a small GPT-2 on 4 ranks, about a minute; DEMO='--steps 100' adds options
# make test                   check correctness, memory and bytes on the CPU, in about five minutes; TESTS='-k tp' chooses
# make test-all               add sanitizers, thread races, emulated GPUs, deliberate mistakes, fuzzing; takes hours
# make doctor                 report what is installed, what is missing, and which of these commands will work
# make bench                  time the programs against PyTorch and llm.c
# make check-programs         check that programs differ only where they must, and print the size of each diff
# make merge-3d               show chapter 8's program as git's merge of tp and pp: conflicts, resolutions, additions
# make lab PROGRAM=ddp        make a program to write yourself; make check-lab PROGRAM=ddp grades it
# make cluster NODES=4        turn this machine into a cluster; make cluster-down ends it
# make site                   build the course as pages for a browser
# make experiments            run the experiments, which answer questions about the programs
# make docs                   renew the numbers that the documents quote
# make cuda-tests variants    build tests of the GPU layers; every kernel in several variants
# make fuzz                   fuzz the readers of files
# make clean clean-data       remove what was built, or the data
#
# DEVICE=cpu|cuda|emulated    where programs run (default: cuda where nvcc and a GPU are present, else cpu);
#                             emulated runs the CUDA path without a GPU
# PRECISION=fp32|bf16|fp16    number format of parameters, activations and gradients
# DEBUG=1                     for gdb; on the CPU with the sanitizers for addresses and undefined behaviour, on a GPU
#                             with a wait after every kernel, which names a kernel that fails
# V=1                         print the commands
# WERROR=1                    treat warnings as errors, in files that are compiled from now on
# ARCH=x86-64-v3              processor to compile for: gcc's -march, on ARM -mcpu (default: native)
# HOST_CXX=clang++            the compiler of a GPU program's host code
# USE_CUDNN=0 USE_NCCL=0      a GPU program without cuDNN (our own attention) or NCCL (ranks communicate by MPI)

# As many compilers at a time as there are cores, unless -j says otherwise; each takes up to half a gigabyte.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$((n < 8 ? n : 8)))
endif

# --- what to build, and where: each combination has a folder of its own, so switching rebuilds nothing ---
GPU := $(shell command -v nvcc >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
DEVICE ?= $(if $(GPU),cuda,cpu)
PRECISION ?= fp32
ARCH := native
variant := $(strip $(filter-out cpu fp32 native,$(DEVICE) $(PRECISION) $(ARCH)) $(if $(filter 0,$(USE_CUDNN)),nocudnn) \
    $(if $(filter 0,$(USE_NCCL)),nonccl) $(notdir $(HOST_CXX)) $(if $(DEBUG),debug))
empty :=
comma := ,
BUILD := build$(if $(variant),/$(subst $(empty) $(empty),-,$(variant)))

ifneq ($(filter-out doctor,$(or $(MAKECMDGOALS),all)),)
ifneq ($(shell test -w . && echo yes),yes)
$(error $(shell id -un) cannot write into $(CURDIR), where programs and data are built; chown it, or clone elsewhere)
endif
endif
ifeq ($(filter fp32 bf16 fp16,$(PRECISION)),)
$(error PRECISION must be fp32, bf16 or fp16, not '$(PRECISION)')
endif
ifeq ($(filter cpu cuda emulated,$(DEVICE)),)
$(error DEVICE must be cpu, cuda or emulated, not '$(DEVICE)')
endif

# --- how: compilers and libraries ---
STRICT := $(filter-out 0,$(WERROR))
# clang has no vector version of expf and tanhf, and warns of each loop that it therefore leaves scalar.
WARNINGS := -Wall -Wextra $(if $(STRICT),-Werror) \
    $(if $(findstring clang,$(shell $(CC) --version 2>/dev/null)),-Wno-pass-failed)
# ARM's -march names an instruction set only; -mcpu names the processor.
FOR_ARCH := $(if $(filter aarch64 arm64,$(shell uname -m)),-mcpu,-march)=$(ARCH)
# Prints one line per program; V=1 also prints the commands.
Q := $(if $(filter-out 0,$(V)),,@)
say = @echo '  $1 $(@:build/%=%)'
# No -ffast-math: it would let the compiler reorder sums. No contraction: code that wants fma says so. No errno from
# sqrtf: nobody reads it, and it would keep AdamW from becoming vector code. -g1: line tables, from which --trace says
# who called (llmc/base/callers.h).
OPTIMISE := $(if $(DEBUG),-Og -g -fsanitize=address$(comma)undefined -fno-sanitize-recover=all \
    -fno-omit-frame-pointer,-O3 -g1)
PRECISION_FLAG := -DPRECISION_$(shell echo $(PRECISION) | tr a-z A-Z)
CFLAGS_ALL = -std=c11 $(OPTIMISE) $(FOR_ARCH) -ffp-contract=off -fno-math-errno -fopenmp $(PRECISION_FLAG) $(WARNINGS) \
    -MMD -MP -MF $@.d -MT $@ $(CFLAGS)
# ccache keeps objects, not programs, so a program is compiled and then linked. Every clone finds what another one
# compiled.
CACHE := $(if $(shell command -v ccache),CCACHE_BASEDIR="$(CURDIR)" CCACHE_NOHASHDIR=1 ccache)
BUILD_C = mkdir -p $(@D) && $(CACHE) $(CC) -x c $(CFLAGS_ALL) -c $< -o $@.o && \
    $(CC) -fopenmp $(filter -fsanitize%,$(OPTIMISE)) $@.o -o $@ $(LDFLAGS)
PROGRAM_LIBRARIES = -ljansson -lpcre2-8 -lpthread -lm
LIBRARIES = -ldnnl $(PROGRAM_LIBRARIES)
# A training program is compiled as C by the CPU's compiler, or as CUDA by nvcc or for the emulator.
BUILD_PROGRAM = $(BUILD_C) $(LIBRARIES)
COMPILER := CC
BUILD_KERNELS = $(error this is a GPU's: make DEVICE=cuda, or DEVICE=emulated where there is none)
ifneq ($(DEVICE),cpu)
include dev/gpu.mk
endif
# The tools that make data, and most tests, are always built for the CPU.
CPU_MAKE = $(MAKE) --no-print-directory $(if $(Q),-s) DEVICE=cpu PRECISION=fp32 DEBUG= ARCH=native HOST_CXX= \
    USE_CUDNN=1 USE_NCCL=1

# --- what: lists, to which dev/dev.mk, labs/labs.mk and test/test.mk add ---
# DEVICE_BUILDS are compiled for DEVICE, C_BUILDS as C for the CPU; OTHER_BUILDS have rules of their own.
PROGRAMS := $(patsubst %.cu,%,$(wildcard train_gpt2_*.cu))
RANKS_PROGRAMS := $(filter-out train_gpt2_single,$(PROGRAMS))
DEVICE_BUILDS := $(PROGRAMS:%=$(BUILD)/%)
C_BUILDS :=
# Programs of several ranks need MPI. All others are built without it (llmc/comm/comm.h).
WITH_MPI := $(addprefix $(BUILD)/,$(RANKS_PROGRAMS) train_gpt2_ddp.o)
COMMANDS := all help demo doctor bench merge-3d cluster cluster-down site experiments docs programs clean clean-data
INTERNAL := find-libraries find-mpi find-nccl
.DEFAULT_GOAL := all
include dev/dev.mk $(wildcard labs/labs.mk test/test.mk)

all: $(PROGRAMS)
# The program under the name that people type. It is a link to the build of the last PRECISION or DEBUG asked for.
$(PROGRAMS): %: $(BUILD)/% data/train.bin
	@ln -sf $< $@
programs: $(PROGRAMS:%=$(BUILD)/%)
$(PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: %.cu
$(DEVICE_BUILDS): $(EMULATOR) | find-libraries
$(DEVICE_BUILDS):
	$(call say,$(COMPILER))
	$(Q)$(BUILD_PROGRAM)
$(C_BUILDS):
	$(call say,CC)
	$(Q)$(BUILD_C) $(LIBRARIES)

# MPI's compiler wrapper knows where it is.
$(WITH_MPI): CFLAGS_ALL += -DUSE_MPI=1 $(shell mpicc --showme:compile)
$(WITH_MPI): COMM_CUDA = $(call of_mpi,compile) -DUSE_MPI=1 -DUSE_NCCL=$(USE_NCCL)
$(WITH_MPI): PROGRAM_LIBRARIES += $(call of_mpi,link)
# nvcc knows these flags by other names.
of_mpi = $(if $(filter cuda,$(DEVICE)),$(patsubst -Wl$(comma)%,-Xlinker %,$(filter-out -pthread,$(mpicc_says))),\
    $(mpicc_says))
# Some builds of Open MPI ask for the new style of rpath, which does not apply to libraries that libraries open
# (dev/find_cuda.sh).
mpicc_says = $(filter-out -Wl$(comma)--enable-new-dtags,$(shell mpicc --showme:$1))
$(WITH_MPI): | find-mpi $(if $(NCCL),find-nccl)
find-mpi:
	@mpicc --showme:version >/dev/null 2>&1 || { echo "error: Open MPI is missing, and runs of several ranks need it;" \
	    "sh dev/setup.sh installs it. make train_gpt2_single needs none" >&2; exit 1; }
# The linker's own message about a missing library would not say how to get it.
find-libraries:
	@$(FIND_LIBRARIES)

# The default data: the programs and llmc/ of one day, as bytes; and the same text in 2048 tokens that are learned
# from it.
data/train.bin: | build/tokenize
	$(Q)sh dev/data/default.sh data build/tokenize
data/bpe/train.bin: | build/tokenize build/train_bpe
	$(Q)sh dev/data/default.sh data/bpe build/tokenize build/train_bpe 2048
ifneq ($(BUILD),build)
build/tokenize build/train_bpe:
	+$(Q)$(CPU_MAKE) $@
endif

# --- for people ---
demo: train_gpt2_ddp train_gpt2_zero train_gpt2_muon data/bpe/train.bin
	@BUILD=$(BUILD) sh dev/demo.sh $(DEMO)
doctor:
	@sh dev/doctor.sh
# Nodes on this machine that have only a network between them, as slow as LINK says: doc/10_cluster.md.
cluster: NODES ?= 4
cluster: RANKS_PER_NODE ?= 1
cluster: LINK ?= 1gbit,200us
cluster:
	@sh dev/cluster/cluster.sh up $(NODES) $(RANKS_PER_NODE) $(LINK)
cluster-down:
	@sh dev/cluster/cluster.sh down
bench:
	+$(Q)$(CPU_MAKE) build/train_gpt2_single
	+$(Q)$(CPU_MAKE) PRECISION=bf16 build/bf16/train_gpt2_single
	python3 -m experiments bench
# Questions with scripts, results and pages (experiments/). It takes up to an hour, and leaves out what is done.
experiments:
	python3 -m experiments
# Renews what the documents quote, from stored results and from runs in a fresh clone.
docs:
	@status=0; python3 dev/docs.py --outputs --write || status=1; python3 dev/docs.py --write --missing || status=1; \
	    exit $$status
# The documents, and programs side by side, as pages for a browser. build/plan has the numbers of its pictures.
site:
	+$(Q)$(CPU_MAKE) build/plan
	sh dev/site/build.sh
# train_gpt2_3d.cu as the merge of two programs: conflicts, their resolutions, and what it adds.
merge-3d:
	@python3 dev/site/merge.py
clean:
	rm -rf build $(PROGRAMS)
clean-data:
	rm -rf data
help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

.PHONY: $(COMMANDS) $(PROGRAMS) $(INTERNAL)
# A goal that is neither of these nor a path is a slip of the pen.
UNKNOWN := $(firstword $(foreach goal,$(filter-out $(COMMANDS) $(PROGRAMS) $(INTERNAL),$(MAKECMDGOALS)),\
    $(if $(findstring /,$(goal)),,$(goal))))
ifneq ($(UNKNOWN),)
$(error there is no target '$(UNKNOWN)'; make help lists the targets)
endif
.DELETE_ON_ERROR:
.SUFFIXES:
# Sources move: older builds still name where they were.
dev/%.c dev/%.cu test/unit/%.c test/unit/%.cu: ;
-include $(wildcard $(addsuffix .d,$(DEVICE_BUILDS) $(C_BUILDS) $(OTHER_BUILDS)))
