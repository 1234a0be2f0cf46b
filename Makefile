# make                        the training programs, and the default data
# make train_gpt2_single      one of them; then ./train_gpt2_single
# make demo                   train a small GPT-2 on 4 ranks, about a minute; DEMO='--steps 100' adds options
# make test                   check every claim about the CPU programs, in some minutes; TESTS='-k tp' chooses
# make test-all               also sanitizers, thread races, emulated GPUs, mistakes on purpose, fuzzing: hours
# make doctor                 report what is installed, what is missing, and which of these commands will work
# make bench                  time the programs against PyTorch and llm.c
# make check-programs         prove that programs differ only where they must
# make merge-3d               the program of chapter 8 as git's merge of tensor and pipeline parallelism
# make lab PROGRAM=ddp        a program to write yourself; make check-lab PROGRAM=ddp grades it
# make cluster NODES=4        turn this machine into a cluster; make cluster-down ends it
# make site                   the course as pages for a browser
# make experiments            questions, with scripts and answers
# make docs                   renew the numbers that the documents quote
# make cuda-tests variants    tests of the GPU layers; every kernel in several variants
# make fuzz                   fuzz the readers of files
# make clean clean-data       remove what was built, or the data
#
# DEVICE=cpu|cuda|emulated    where programs run (default: cuda where nvcc and a GPU are present, else cpu);
#                             emulated runs the CUDA path without a GPU
# PRECISION=fp32|bf16|fp16    number format of parameters, activations and gradients
# DEBUG=1                     for gdb; on the CPU with the sanitizers for addresses and undefined behaviour, on a GPU
#                             with a wait after every kernel, which names a kernel that fails
# V=1                         print the commands
# WERROR=1                    warnings are errors, in files that are compiled from now on
# ARCH=x86-64-v3              processor to compile for: gcc's -march, on ARM -mcpu (default: native)
# HOST_CXX=clang++            the compiler of a GPU program's host code
# USE_CUDNN=0 USE_NCCL=0      a GPU program without cuDNN (our own attention) or NCCL (ranks communicate by MPI)

# As many compilers at a time as there are cores, unless -j says otherwise; each takes up to half a gigabyte.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$((n < 8 ? n : 8)))
endif

# --- what to build, and where: each combination has a folder of its own, so switching rebuilds nothing ---
GPU := $(shell command -v nvcc >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
# The compute capabilities of this machine's GPUs, from 7.5 (T4) on: 75 80 90.
HERE = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -xE '7\.5|([89]|[1-9][0-9])\.[0-9]' | tr -d . | sort -u)
DEVICE ?= $(if $(GPU),cuda,cpu)
PRECISION ?= fp32
ARCH := native
variant := $(strip $(filter-out cpu fp32 native,$(DEVICE) $(PRECISION) $(ARCH)) $(if $(filter 0,$(USE_CUDNN)),nocudnn) $(if $(filter 0,$(USE_NCCL)),nonccl) $(notdir $(HOST_CXX)) $(if $(DEBUG),debug))
empty :=
comma := ,
BUILD := build$(if $(variant),/$(subst $(empty) $(empty),-,$(variant)))

ifneq ($(filter-out doctor,$(or $(MAKECMDGOALS),all)),)
ifneq ($(shell test -w . && echo yes),yes)
$(error user '$(shell id -un)' may not write in $(CURDIR), where programs and data are built: chown it, or clone into a folder of your own)
endif
endif
ifeq ($(filter fp32 bf16 fp16,$(PRECISION)),)
$(error PRECISION must be fp32, bf16 or fp16, not '$(PRECISION)')
endif
ifeq ($(filter cpu cuda emulated,$(DEVICE)),)
$(error DEVICE must be cpu, cuda or emulated, not '$(DEVICE)')
endif

# --- compiler and libraries ---
STRICT := $(filter-out 0,$(WERROR))
# clang has no vector version of expf and tanhf, and warns of each loop that it therefore leaves scalar.
WARNINGS := -Wall -Wextra $(if $(STRICT),-Werror) \
    $(if $(findstring clang,$(shell $(CC) --version 2>/dev/null)),-Wno-pass-failed)
# ARM's -march names an instruction set only; -mcpu names the processor.
FOR_ARCH := $(if $(filter aarch64 arm64,$(shell uname -m)),-mcpu,-march)=$(ARCH)
# Prints one line per program; V=1 also prints the commands.
Q := $(if $(filter-out 0,$(V)),,@)
say = @echo '  $1 $(@:build/%=%)'
# No -ffast-math: it would let the compiler reorder sums. No contraction: code that wants fma says so. No errno from sqrtf: nobody
# reads it, and it would keep AdamW from becoming vector code.
OPTIMISE := $(if $(DEBUG),-Og -g -fsanitize=address$(comma)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer,-O3)
PRECISION_FLAG := -DPRECISION_$(shell echo $(PRECISION) | tr a-z A-Z)
CFLAGS_ALL = -std=c11 $(OPTIMISE) $(FOR_ARCH) -ffp-contract=off -fno-math-errno -fopenmp $(PRECISION_FLAG) $(WARNINGS) -MMD -MP -MF $@.d -MT $@ $(CFLAGS)
# ccache keeps objects, not programs, so a program is compiled and then linked. Every clone finds what another one compiled.
CACHE := $(if $(shell command -v ccache),CCACHE_BASEDIR="$(CURDIR)" CCACHE_NOHASHDIR=1 ccache)
BUILD_C = mkdir -p $(@D) && $(CACHE) $(CC) -x c $(CFLAGS_ALL) -c $< -o $@.o && $(CC) -fopenmp $(filter -fsanitize%,$(OPTIMISE)) $@.o -o $@ $(LDFLAGS)
PROGRAM_LIBRARIES = -ljansson -lpcre2-8 -lpthread -lm
LIBRARIES = -ldnnl $(PROGRAM_LIBRARIES)
BUILD_CUDA_TEST = $(error these tests are a GPU's: make DEVICE=cuda cuda-tests, or DEVICE=emulated where there is none)
BUILD_VARIANT = $(error these kernels are a GPU's: make DEVICE=cuda variants, or DEVICE=emulated where there is none)

# Programs of several ranks need MPI; its compiler wrapper knows where it is. All others are built without (llmc/comm/comm.h).
WITH_COMM := $(patsubst %,$(BUILD)/%,train_gpt2_ddp train_gpt2_ddp.o train_gpt2_zero train_gpt2_fsdp train_gpt2_zeropp train_gpt2_tp train_gpt2_pp train_gpt2_3d train_gpt2_cp train_gpt2_compress comm_bench test/test_comm_cuda)
WITH_MPI := $(WITH_COMM) $(BUILD)/test/test_comm $(BUILD)/test/test_sharding
$(WITH_MPI): CFLAGS_ALL += -DUSE_MPI=1 $(shell mpicc --showme:compile)
$(WITH_MPI): COMM_CUDA = $(call of_mpi,compile) -DUSE_MPI=1 -DUSE_NCCL=$(USE_NCCL)
$(WITH_MPI) build/tsan/test/test_comm: PROGRAM_LIBRARIES += $(call of_mpi,link)
# nvcc knows these flags by other names.
of_mpi = $(if $(filter cuda,$(DEVICE)),$(patsubst -Wl$(comma)%,-Xlinker %,$(filter-out -pthread,$(mpicc_says))),$(mpicc_says))
# Some builds of Open MPI ask for the new style of rpath, which does not apply to libraries that libraries open (dev/find_cuda.sh).
mpicc_says = $(filter-out -Wl$(comma)--enable-new-dtags,$(shell mpicc --showme:$1))
$(WITH_MPI) build/tsan/test/test_comm: | find-mpi
find-mpi:
	@mpicc --showme:version >/dev/null 2>&1 || { echo "error: Open MPI is missing, and runs of several ranks need it;" \
	    "sh dev/setup.sh installs it. make train_gpt2_single needs none" >&2; exit 1; }

# On a GPU ranks also use NCCL; like cuDNN, the program opens it.
USE_CUDNN ?= 1
USE_NCCL ?= 1
CUDNN := $(if $(filter cpu,$(DEVICE))$(filter 0,$(USE_CUDNN)),,cudnn)
NCCL := $(if $(filter cpu,$(DEVICE))$(filter 0,$(USE_NCCL)),,nccl)
$(WITH_COMM): | $(if $(NCCL),find-nccl)
find-nccl:
	@sh dev/find_cuda.sh compile nccl >/dev/null || { echo "Or build without it: make USE_NCCL=0." >&2; exit 1; }

# --- how a program is compiled: as C by the CPU's compiler, as CUDA by nvcc ---
ifeq ($(DEVICE),cpu)
BUILD_PROGRAM = $(BUILD_C) $(LIBRARIES)
COMPILER := CC
endif

ifeq ($(DEVICE),cuda)
NVCC ?= nvcc
COMPILER := NVCC
# nvcc hands on one file, in which macros and headers are expanded. There clang warns of a constant compared with itself, of
# functions that this program does not call, even of NVIDIA's, and of loops that it could not vectorise.
NVCC_HOST := $(if $(HOST_CXX),-ccbin $(HOST_CXX)) $(if $(findstring clang,$(HOST_CXX)),-Xcompiler \
    -Wno-tautological-compare$(comma)-Wno-unused-function$(comma)-Wno-pass-failed)
# The GPUs that are here, if they are new enough; otherwise the most common ones for training, and PTX, which the driver compiles
# for newer ones. CAPABILITIES="75 90" names others.
HERE := $(HERE)
CAPABILITIES := $(if $(filter bf16,$(PRECISION)),$(filter-out 75,$(HERE)),$(HERE))
ifneq ($(and $(filter bf16,$(PRECISION)),$(or $(filter 75,$(CAPABILITIES)),$(if $(CAPABILITIES),,$(filter 75,$(HERE))))),)
$(error bf16 needs a GPU of compute capability 8.0 (A100, RTX 30), and this build is for 7.5 (T4, RTX 20): make PRECISION=fp16 or fp32)
endif
GENCODE := $(foreach c,$(or $(CAPABILITIES),80 90),-gencode arch=compute_$c$(comma)code=sm_$c)
GENCODE += $(if $(CAPABILITIES),,-gencode arch=compute_90$(comma)code=compute_90)
NVCC_FLAGS = -std=c++17 $(if $(DEBUG),-O1 -g -lineinfo -DDEBUG,-O3) $(GENCODE) --threads 0 -Xcompiler $(FOR_ARCH) \
    $(if $(STRICT),-Werror all-warnings) -Xcompiler -Wall,-Wextra$(if $(STRICT),$(comma)-Werror),-fopenmp,-ffp-contract=off,-fno-math-errno \
    $(NVCC_HOST) $(PRECISION_FLAG) -DUSE_CUDNN=$(USE_CUDNN) -MMD -MP -MF $@.d -MT $@ $(NVCCFLAGS)
# Only cuBLASLt is linked. The program opens cuDNN at run time, and can run without it.
BUILD_CUDA = mkdir -p $(@D) && $(CACHE) $(NVCC) $(NVCC_FLAGS) $(shell sh dev/find_cuda.sh compile cublasLt $(CUDNN) $(if $(COMM_CUDA),$(NCCL)))
LINK_CUDA = $(LDFLAGS) $(shell sh dev/find_cuda.sh link cublasLt) $(if $(CUDNN),$(shell sh dev/find_cuda.sh rpath cudnn nvrtc)) \
    $(if $(NCCL),$(shell sh dev/find_cuda.sh rpath nccl 2>/dev/null))
LINK_OBJECT = $(NVCC) $(NVCC_HOST) $(GENCODE) -Xcompiler -fopenmp $@.o -o $@ $(LINK_CUDA)
BUILD_PROGRAM = $(BUILD_CUDA) $(COMM_CUDA) -c $< -o $@.o && $(LINK_OBJECT) $(PROGRAM_LIBRARIES)
# Only compiled: what a program links, as clang's OpenMP, may not be here.
$(BUILD)/train_gpt2_%.o: train_gpt2_%.cu | find-libraries
	$(call say,NVCC)
	$(Q)$(BUILD_CUDA) $(COMM_CUDA) -c $< -o $@
BUILD_CUDA_TEST = $(BUILD_PROGRAM)
BUILD_VARIANT = $(BUILD_CUDA) -c $< -o $@.o && $(LINK_OBJECT) $(BUILD)/test/cpu_layers.o -ldnnl -lgomp -lm
FIND_LIBRARIES = sh dev/find_cuda.sh link cublasLt $(CUDNN) >/dev/null || \
    { echo "Or build for the CPU: make DEVICE=cpu. make doctor says what is here." >&2; exit 1; }
endif

# The same source with stand-ins for the GPU and its libraries; only their headers are needed. DEBUG=1 adds the address sanitizer,
# which also sees into kernels.
ifeq ($(DEVICE),emulated)
COMPILER := EMULATE
EMULATOR := $(wildcard dev/emulator/*.cpp dev/emulator/*.h dev/emulator/*.sh dev/emulator/*.pl)
STAND_INS = $(CUDNN) $(if $(COMM_CUDA),$(NCCL))
EMULATE = mkdir -p $(@D) && CPPFLAGS="$(shell sh dev/find_cuda.sh compile cublasLt $(STAND_INS))" EMULATOR_LIBRARIES="cublaslt $(STAND_INS)" \
    sh dev/emulator/compile.sh $< $@ $(if $(DEBUG),asan -DDEBUG,plain) $(PRECISION_FLAG) -DUSE_CUDNN=$(USE_CUDNN)
BUILD_PROGRAM = $(EMULATE) $(COMM_CUDA) $(CFLAGS) $(LDFLAGS) $(PROGRAM_LIBRARIES)
BUILD_VARIANT = $(EMULATE) $(BUILD)/test/cpu_layers.o $(CFLAGS) $(LDFLAGS) -ldnnl -fopenmp
BUILD_CUDA_TEST = $(BUILD_PROGRAM)
FIND_LIBRARIES = sh dev/find_cuda.sh compile cublasLt $(CUDNN) >/dev/null
endif

PROGRAMS := $(patsubst %.cu,%,$(wildcard train_gpt2_*.cu))
TOOLS := tokenize train_bpe convert schedule_order
CONVERTERS := hf_export hf_import llmc_import
PYTHON_TOOLS := advise overlap ranks schedule
C_TESTS := $(patsubst test/unit/%.c,%,$(wildcard test/unit/test_*.c))

# The tools that make data, and most tests, are always built for the CPU.
CPU_MAKE = $(MAKE) --no-print-directory $(if $(Q),-s) DEVICE=cpu PRECISION=fp32 DEBUG=

.DEFAULT_GOAL := all
all: $(PROGRAMS)

# The program under the name that people type. It is a link to the build of the last PRECISION or DEBUG asked for.
$(PROGRAMS): %: $(BUILD)/% data/train.bin
	@ln -sf $< $@

# The linker's own message about a missing library would not say how to get it.
find-libraries:
	@$(FIND_LIBRARIES)

programs: $(PROGRAMS:%=$(BUILD)/%)
$(BUILD)/train_gpt2_%: train_gpt2_%.cu $(EMULATOR) | find-libraries
	$(call say,$(COMPILER))
	$(Q)$(BUILD_PROGRAM)

tools: $(TOOLS:%=$(BUILD)/%) $(CONVERTERS:%=$(BUILD)/%) $(PYTHON_TOOLS:%=$(BUILD)/%) $(BUILD)/plan
$(TOOLS:%=$(BUILD)/%): $(BUILD)/%:
	$(call say,CC)
	$(Q)$(BUILD_C) $(LIBRARIES)
$(addprefix $(BUILD)/,tokenize train_bpe): $(BUILD)/%: dev/data/%.c
$(addprefix $(BUILD)/,convert schedule_order): $(BUILD)/%: dev/tools/%.c
# One program, which does what its name says.
$(CONVERTERS:%=$(BUILD)/%): $(BUILD)/convert
	@ln -sf $(<F) $@
# What is in Python is linked under the same name, and reads the files beside the script.
$(PYTHON_TOOLS:%=$(BUILD)/%): $(BUILD)/%: dev/tools/%.py
	@mkdir -p $(@D)
	@ln -sf $(if $(variant),../)../$< $@
$(BUILD)/schedule: | $(BUILD)/schedule_order
# build/plan, whose code is dev/tools/plan, and the programs that it asks: schedule_order, and the training programs' --predict. The latter compute
# little, so they are hardly optimised, and they need no MPI.
PLAN_PROGRAMS := $(foreach s,ddp zero fsdp zeropp tp pp 3d cp compress,$(foreach p,fp32 bf16,$(BUILD)/predict/train_gpt2_$s.$p)) \
    $(BUILD)/predict/train_gpt2_compress.fp16
$(BUILD)/plan: Makefile $(PLAN_PROGRAMS) $(BUILD)/schedule_order
	@printf '#!/bin/sh\nPLAN_PROGRAMS="$$(dirname -- "$$0")/predict" exec python3 "%s/dev/tools/plan" "$$@"\n' "$(CURDIR)" >$@
	@chmod +x $@
$(PLAN_PROGRAMS): PRECISION_FLAG = -DPRECISION_$(shell echo $(patsubst .%,%,$(suffix $@)) | tr a-z A-Z)
# A search of meshes asks two of them for every stage of every pipeline.
PLAN_SEARCHED := $(filter $(BUILD)/predict/train_gpt2_pp.% $(BUILD)/predict/train_gpt2_3d.%,$(PLAN_PROGRAMS))
$(PLAN_SEARCHED): OPTIMISE := $(subst -O3,-O1,$(OPTIMISE))
$(filter-out $(PLAN_SEARCHED),$(PLAN_PROGRAMS)): OPTIMISE := $(subst -O3,-O0,$(OPTIMISE))
.SECONDEXPANSION:
$(PLAN_PROGRAMS): $(BUILD)/predict/%: $$(basename $$*).cu
	$(call say,CC)
	$(Q)$(BUILD_C) $(LIBRARIES)
# What computes little need not compile for long: all but the tools that read whole corpora.
SMALL := $(filter-out tokenize train_bpe,$(TOOLS)) $(addprefix test/,$(C_TESTS))
$(SMALL:%=$(BUILD)/%): OPTIMISE := $(subst -O3,-O1,$(OPTIMISE))

# The default data: the programs and llmc/ of one day, as bytes.
data/train.bin: | build/tokenize
	$(Q)sh dev/data/default.sh data build/tokenize
# The same text in 2048 tokens that are learned from it.
data/bpe/train.bin: | build/tokenize build/train_bpe
	$(Q)sh dev/data/default.sh data/bpe build/tokenize build/train_bpe 2048
ifneq ($(BUILD),build)
build/tokenize build/train_bpe:
	+$(Q)$(CPU_MAKE) $@
endif

# --- for people ---
demo: train_gpt2_ddp train_gpt2_zero data/bpe/train.bin
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
	+$(Q)$(if $(shell command -v mpicc),$(CPU_MAKE) build/train_gpt2_ddp build/train_gpt2_fsdp)
	python3 dev/bench/bench.py

# --- labs: programs with bodies to write (labs/README.md) ---
#   make lab PROGRAM=ddp         makes labs/ddp, with a list of what to write
#   make check-lab PROGRAM=ddp   builds it and says which claims hold; LAB=FOLDER: one that is elsewhere
# A blank compiles, but not everything is called yet. -O1 because a student waits for each build.
LABS := $(patsubst labs/%.toml,%,$(wildcard labs/*.toml))
ifneq ($(filter lab lab-program check-lab,$(MAKECMDGOALS)),)
ifeq ($(filter $(LABS),$(PROGRAM)),)
$(error PROGRAM must be one of: $(LABS); not '$(PROGRAM)'. For example: make $(firstword $(filter lab lab-program check-lab,$(MAKECMDGOALS))) PROGRAM=ddp)
endif
LAB ?= labs/$(PROGRAM)
LAB_PROGRAM := $(LAB)/build/train_gpt2_$(PROGRAM)
ifneq ($(PROGRAM),single)
$(LAB_PROGRAM): LAB_MPI = -DUSE_MPI=1 $(shell mpicc --showme:compile)
$(LAB_PROGRAM): LAB_LIBRARIES = $(shell mpicc --showme:link)
$(LAB_PROGRAM): | find-mpi
endif
lab:
	@python3 labs/make_lab.py $(PROGRAM) $(LAB)
lab-program: $(LAB_PROGRAM) data/train.bin
check-lab:
	@python3 labs/check_lab.py $(PROGRAM) $(LAB)
$(LAB)/train_gpt2_$(PROGRAM).cu:
	@echo "error: there is no $@: make lab PROGRAM=$(PROGRAM)$(if $(filter-out labs/$(PROGRAM),$(LAB)), LAB=$(LAB)) makes it" >&2; exit 1
$(LAB_PROGRAM): $(LAB)/train_gpt2_$(PROGRAM).cu
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) -x c -std=c11 -O1 -g $(FOR_ARCH) -ffp-contract=off -fno-math-errno -fopenmp -DPRECISION_FP32 -Wall -Wextra -Wno-unused \
	    -Werror=return-type -MMD -MP -I. $(LAB_MPI) $(CFLAGS) $< -o $@ $(LDFLAGS) $(LIBRARIES) $(LAB_LIBRARIES)
-include $(wildcard $(LAB_PROGRAM).d)
endif

# Questions with scripts, results and pages (experiments/). It takes up to an hour, and leaves out what is done: see run.py.
experiments:
	python3 experiments/run.py

# What the documents quote, renewed from stored results and from runs in a fresh clone; what their sentences say then stands for correction.
docs:
	@status=0; python3 dev/doc_outputs.py --write || status=1; python3 dev/doc_numbers.py --write --missing || status=1; exit $$status

# The documents, and programs side by side, as pages for a browser: build/site/index.html. build/plan has the numbers of its pictures.
site:
	+$(Q)$(CPU_MAKE) build/plan
	sh dev/site/build.sh

# --- tests ---
$(C_TESTS:%=$(BUILD)/test/%): $(BUILD)/test/%: test/unit/%.c
	$(call say,CC)
	$(Q)$(BUILD_C) -lcmocka $(LIBRARIES)
# The layers as a shared library, which test/kernels/test_layers.py compares with their definitions.
$(BUILD)/layers.so: CFLAGS_ALL += -fPIC
$(BUILD)/layers.so: NVCC_FLAGS += -Xcompiler -fPIC
$(BUILD)/layers.so: override LDFLAGS += -shared
$(BUILD)/layers.so: test/unit/layers.cu
# Layers one by one, within a whole step: build/bench_layers [B T [steps]].
$(BUILD)/bench_layers: $(if $(filter cpu,$(DEVICE)),dev/cpu/bench_layers.c,dev/cuda/bench_layers.cu)
# Collectives, how fast they are and whether they are right: for mpirun, on whatever ranks have.
$(BUILD)/comm_bench: dev/comm/comm_bench.cu
# The kernels that compress gradients, beside a copy: build/bench_compress [ELEMENTS [REPETITIONS]].
$(BUILD)/bench_compress: dev/bench/bench_compress.cu
# Collectives between GPUs, or ranks that share one: a program for mpirun.
$(BUILD)/test/test_comm_cuda: test/unit/test_comm_cuda.cu
BENCHES := $(addprefix $(BUILD)/,bench_layers comm_bench bench_compress layers.so test/test_comm_cuda)
$(BENCHES): | find-libraries
	$(call say,$(COMPILER))
	$(Q)$(BUILD_PROGRAM)
$(BENCHES): $(EMULATOR)
# The CPU's layers, each written in several ways: checked, and timed.
CPU_VARIANTS := $(filter-out bench_layers,$(patsubst dev/cpu/%.c,%,$(wildcard dev/cpu/*.c)))
cpu-variants run-cpu-variants: $(CPU_VARIANTS:%=$(BUILD)/cpu_variants/%)
$(CPU_VARIANTS:%=$(BUILD)/cpu_variants/%): $(BUILD)/cpu_variants/%: dev/cpu/%.c
	$(call say,CC)
	$(Q)$(BUILD_C) $(LIBRARIES)

cuda-tests: $(BUILD)/layers.so $(BUILD)/test/test_cuda_device
# When marks were passed, by events that the test sets.
$(BUILD)/test/test_cuda_device: test/unit/test_cuda_device.cu $(EMULATOR) | find-libraries
	$(call say,$(COMPILER))
	$(Q)$(BUILD_CUDA_TEST)
# One operation in several kernels, from naive to llmc/'s: checked against the CPU's layer, and on a GPU timed.
VARIANTS := $(filter-out bench_layers,$(patsubst dev/cuda/%.cu,%,$(wildcard dev/cuda/*.cu)))
variants run-variants: $(VARIANTS:%=$(BUILD)/variants/%)
# wgmma and TMA are what only compute capability 9.0 has, and code for it alone may use.
$(VARIANTS:%=$(BUILD)/variants/%): GENCODE := $(subst compute_90$(comma)code=sm_90,compute_90a$(comma)code=sm_90a,$(GENCODE))
$(VARIANTS:%=$(BUILD)/variants/%): $(BUILD)/variants/%: dev/cuda/%.cu $(BUILD)/test/cpu_layers.o $(EMULATOR) | find-libraries
	$(call say,$(COMPILER))
	$(Q)$(BUILD_VARIANT)
run-variants run-cpu-variants:
	@sh dev/run_variants.sh $^
$(BUILD)/test/cpu_layers.o: dev/cuda/cpu_layers.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) -std=c11 -O3 $(FOR_ARCH) -ffp-contract=off -fopenmp $(PRECISION_FLAG) $(WARNINGS) -MMD -MP -c $< -o $@

# Threads under ThreadSanitizer: the loader's, the watchdog's, and the one that talks to MPI.
TSAN_TESTS := build/tsan/test/test_dataloader build/tsan/test/test_control build/tsan/test/test_comm
build/tsan/test/test_comm: CFLAGS += -DUSE_MPI=1 $(shell mpicc --showme:compile)
$(TSAN_TESTS): build/tsan/test/%: test/unit/%.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) -std=c11 -O1 -g -fsanitize=thread $(FOR_ARCH) -fopenmp $(WARNINGS) -MMD -MP $(CFLAGS) $< -o $@ -lcmocka $(LIBRARIES)

# libFuzzer targets of the readers. A reader's die() calls exit(); the target wraps it and returns to the fuzzer.
FUZZERS := tokens mask tokenizer safetensors
$(FUZZERS:%=build/fuzz/%): build/fuzz/%: test/unit/fuzz_%.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined $(WARNINGS) -MMD -MP $< -o $@ -Wl,--wrap=exit -ljansson -lpcre2-8 -lpthread -lm
# A clang without its libFuzzer can compile none of them.
CAN_FUZZ = $(shell printf 'int LLVMFuzzerTestOneInput(void) { return 0; }' | clang -x c - -fsanitize=fuzzer -o /dev/null 2>/dev/null && echo yes)
fuzz: $(FUZZERS:%=build/fuzz/%)
	sh test/unit/fuzz.sh $(or $(FUZZ_SECONDS),60)

# Everything that the tests run, in one build.
test-build: $(PROGRAMS:%=$(BUILD)/%) tools $(C_TESTS:%=$(BUILD)/test/%) $(BUILD)/layers.so $(BUILD)/comm_bench
FLOATX_TESTS := layers.so test/test_param_ranges
RANKS_TESTS := train_gpt2_ddp train_gpt2_zero train_gpt2_fsdp train_gpt2_zeropp train_gpt2_tp train_gpt2_pp train_gpt2_3d train_gpt2_cp train_gpt2_compress
# (+: these are makes, and share -j.)
TEST_PROGRAMS := test-fp32 test-bf16 test-fp16 test-debug # side by side, so that no core waits for the last program of one build
test-programs: $(TEST_PROGRAMS)
$(TEST_PROGRAMS): data/train.bin data/bpe/train.bin
test-fp32:
	+$(Q)$(CPU_MAKE) test-build
test-bf16:
	+$(Q)$(CPU_MAKE) PRECISION=bf16 $(FLOATX_TESTS:%=build/bf16/%) $(addprefix build/bf16/train_gpt2_,single ddp zero fsdp)
test-fp16:
	+$(Q)$(CPU_MAKE) PRECISION=fp16 build/fp16/train_gpt2_single
test-debug:
	+$(Q)$(CPU_MAKE) DEBUG=1 build/debug/train_gpt2_ddp
test-all-programs: test-programs
	+$(Q)$(CPU_MAKE) cpu-variants $(TSAN_TESTS) build/bench_layers build/bench_compress $(if $(CAN_FUZZ),$(FUZZERS:%=build/fuzz/%))
	+$(Q)$(CPU_MAKE) DEBUG=1 test-build
	+$(Q)$(CPU_MAKE) PRECISION=bf16 $(RANKS_TESTS:%=build/bf16/%)
	+$(Q)$(CPU_MAKE) PRECISION=fp16 $(FLOATX_TESTS:%=build/fp16/%) $(RANKS_TESTS:%=build/fp16/%)
	+$(Q)$(CPU_MAKE) PRECISION=bf16 DEBUG=1 $(addprefix build/bf16-debug/,$(FLOATX_TESTS) train_gpt2_single $(RANKS_TESTS))
	+$(Q)$(CPU_MAKE) PRECISION=fp16 DEBUG=1 $(addprefix build/fp16-debug/,$(FLOATX_TESTS) train_gpt2_single)
# The first Python that has pytest, xdist and numpy. JOBS: twice as many tests at a time as there are cores, because many tests wait more
# than they compute.
PYTEST = $(or $(shell for p in python3 /usr/bin/python3; do $$p -c 'import pytest, xdist, numpy' 2>/dev/null && echo $$p -m pytest && break; done),\
    $(error pytest, xdist or numpy is missing: sh dev/setup.sh installs them))
JOBS ?= 4
RUN_TESTS = $(PYTEST) -rs -n $(JOBS) $(TESTS)
BEGAN := $(if $(filter test test-all,$(MAKECMDGOALS)),$(shell date +%s))
SECONDS_SINCE = $$(($$(date +%s) - $(BEGAN)))
RELIED_ON := layers and 20-step runs of every program agree with PyTorch, programs with each other to the bit, bytes are as predicted, bad input \
    and dead ranks lose nothing
# Every claim about the CPU's programs once, some minutes. TESTS='-k tp' chooses.
test: test-programs
	@built=$(SECONDS_SINCE); echo "the programs are built, in $$built s; now the tests"; $(RUN_TESTS) --tier quick && \
	    echo "make test passed in $(SECONDS_SINCE) s, of which $$built s built the programs: $(if $(TESTS),the tests that TESTS chose,$(RELIED_ON))."
# Everything: further ranks and shapes, sanitizers, thread races, emulated kernels, mistakes on purpose, fuzzing, Hugging Face's libraries.
test-all: test-all-programs
	@$(RUN_TESTS) --durations=20 --tier all
	@echo "make test-all passed in $(SECONDS_SINCE) s: $(RELIED_ON); also under sanitizers and on emulated GPUs, and mistakes made on purpose are caught."
# The files of the commit choose a part of what test-all adds to test: a tenth of long tables, a fifth of all else.
test-rest: test-all-programs
	@$(RUN_TESTS) --durations=20 --tier rest --part
# Programs differ only where they must; how much there is to read from one to the next.
check-programs:
	@$(PYTEST) -q -s test/test_programs.py
# train_gpt2_3d.cu as the merge of two programs: conflicts, their resolutions, and what it adds.
merge-3d:
	@python3 dev/site/merge.py
clean:
	rm -rf build $(PROGRAMS)
clean-data:
	rm -rf data
help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile
# What people type, and what only other rules and scripts ask for.
COMMANDS := all help demo test test-all test-rest doctor bench check-programs merge-3d lab check-lab cluster cluster-down site experiments docs fuzz \
    cuda-tests variants run-variants cpu-variants run-cpu-variants programs tools test-programs test-all-programs clean clean-data
INTERNAL := $(TEST_PROGRAMS) test-build lab-program find-libraries find-mpi find-nccl
.PHONY: $(COMMANDS) $(PROGRAMS) $(INTERNAL)
# A goal that is neither of these nor a path is a slip of the pen.
UNKNOWN := $(firstword $(foreach goal,$(filter-out $(COMMANDS) $(PROGRAMS) $(INTERNAL),$(MAKECMDGOALS)),$(if $(findstring /,$(goal)),,$(goal))))
ifneq ($(UNKNOWN),)
NEAR := $(shell sh dev/nearest.sh '$(UNKNOWN)' $(COMMANDS) $(PROGRAMS))
$(error there is no target '$(UNKNOWN)'; $(if $(NEAR),did you mean make $(NEAR)? )make help lists the targets)
endif
.DELETE_ON_ERROR:
.SUFFIXES:
# Some tools were programs of C; old folders still have what they included.
-include $(filter-out $(patsubst %,$(BUILD)/%.d,plan $(PYTHON_TOOLS)),$(wildcard $(BUILD)/*.d)) $(wildcard $(BUILD)/predict/*.d $(BUILD)/test/*.d $(BUILD)/variants/*.d $(BUILD)/cpu_variants/*.d build/tsan/test/*.d build/fuzz/*.d)
