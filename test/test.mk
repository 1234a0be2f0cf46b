# Tests: programs in C and CUDA, and what pytest runs. Included by ../Makefile.
COMMANDS += test test-all test-rest check-programs cuda-tests fuzz test-programs test-all-programs
INTERNAL += test-build

# --- unit tests in C ---
# With -O3 they take 52 s of one core to compile, with -O1 25 s; each runs within seconds.
C_TESTS := $(patsubst test/unit/%.c,%,$(wildcard test/unit/test_*.c))
C_BUILDS += $(C_TESTS:%=$(BUILD)/test/%)
$(C_TESTS:%=$(BUILD)/test/%): $(BUILD)/test/%: test/unit/%.c
$(C_TESTS:%=$(BUILD)/test/%): LIBRARIES += -lcmocka
$(C_TESTS:%=$(BUILD)/test/%): OPTIMISE := $(subst -O3,-O1,$(OPTIMISE))
WITH_MPI += $(addprefix $(BUILD)/test/,test_comm test_sharding)

# Threads under ThreadSanitizer: the loader's, the watchdog's, and the one that talks to MPI.
TSAN_TESTS := $(addprefix build/tsan/test/,test_dataloader test_control test_comm)
C_BUILDS += $(TSAN_TESTS)
WITH_MPI += build/tsan/test/test_comm
$(TSAN_TESTS): build/tsan/test/%: test/unit/%.c
$(TSAN_TESTS): OPTIMISE := -O1 -g -fsanitize=thread
$(TSAN_TESTS): LIBRARIES += -lcmocka

# The readers of files under libFuzzer. A reader's die() calls exit(); the program wraps it and returns to the fuzzer.
OTHER_BUILDS += build/test/fuzz
build/test/fuzz: test/unit/fuzz.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined $(WARNINGS) -MMD -MP -MF $@.d -MT $@ $< -o $@ \
	    -Wl,--wrap=exit $(PROGRAM_LIBRARIES)
# A clang without its libFuzzer cannot compile it.
CAN_FUZZ = $(shell printf 'int LLVMFuzzerTestOneInput(void) { return 0; }' | \
    clang -x c - -fsanitize=fuzzer -o /dev/null 2>/dev/null && echo yes)
fuzz: build/test/fuzz
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),60) $(PYTEST) -v test/tools/test_fuzz.py --tier all

# --- tests of a device: the CPU's, a GPU's, or the emulator's ---
# The layers as a shared library, which test/kernels/test_layers.py compares with their definitions.
$(BUILD)/layers.so: test/unit/layers.cu
# Functions that need no program around them, likewise (check_host.py).
$(BUILD)/host.so: test/unit/host.c
C_BUILDS += $(BUILD)/host.so
$(BUILD)/layers.so $(BUILD)/host.so: CFLAGS_ALL += -fPIC
$(BUILD)/layers.so: NVCC_FLAGS += -Xcompiler -fPIC
$(BUILD)/layers.so $(BUILD)/host.so: override LDFLAGS += -shared
# When marks were passed, by events that the test sets.
$(BUILD)/test/test_cuda_device: test/unit/test_cuda_device.cu
cuda-tests: $(BUILD)/layers.so $(BUILD)/test/test_cuda_device
# Collectives between GPUs, or ranks that share one: a program for mpirun.
$(BUILD)/test/test_comm_cuda: test/unit/test_comm_cuda.cu
DEVICE_BUILDS += $(addprefix $(BUILD)/,layers.so test/test_cuda_device test/test_comm_cuda)
WITH_MPI += $(BUILD)/test/test_comm_cuda

# --- everything that the tests run ---
test-build: $(PROGRAMS:%=$(BUILD)/%) tools $(C_TESTS:%=$(BUILD)/test/%) $(BUILD)/layers.so $(BUILD)/host.so \
    $(BUILD)/comm_bench
FLOATX_TESTS := layers.so host.so test/test_layer_contracts test/test_compress_rounds
# Side by side, so that no core waits for the last program of one build. (+: these are makes, and share -j.)
TEST_PROGRAMS := test-fp32 test-bf16 test-fp16 test-debug
INTERNAL += $(TEST_PROGRAMS)
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
	+$(Q)$(CPU_MAKE) cpu-variants $(TSAN_TESTS) build/bench_layers build/bench_compress $(if $(CAN_FUZZ),build/test/fuzz)
	+$(Q)$(CPU_MAKE) DEBUG=1 test-build
	+$(Q)$(CPU_MAKE) PRECISION=bf16 $(RANKS_PROGRAMS:%=build/bf16/%)
	+$(Q)$(CPU_MAKE) PRECISION=fp16 $(FLOATX_TESTS:%=build/fp16/%) $(RANKS_PROGRAMS:%=build/fp16/%)
	+$(Q)$(CPU_MAKE) PRECISION=bf16 DEBUG=1 $(addprefix build/bf16-debug/,$(FLOATX_TESTS) $(PROGRAMS))
	+$(Q)$(CPU_MAKE) PRECISION=fp16 DEBUG=1 $(addprefix build/fp16-debug/,$(FLOATX_TESTS) train_gpt2_single)

# --- pytest ---
# The first Python that has pytest, xdist and numpy. JOBS: twice as many tests at a time as there are cores, because
# many tests wait more than they compute.
PYTEST = $(or $(shell for p in python3 /usr/bin/python3; do \
    $$p -c 'import pytest, xdist, numpy' 2>/dev/null && echo $$p -m pytest && break; done),\
    $(error pytest, xdist or numpy is missing: sh dev/setup.sh installs them))
JOBS ?= 4
RUN_TESTS = $(PYTEST) -rs -n $(JOBS) $(TESTS)
BEGAN := $(if $(filter test test-all,$(MAKECMDGOALS)),$(shell date +%s))
SECONDS_SINCE = $$(($$(date +%s) - $(BEGAN)))
RELIED_ON := layers and 20-step runs of every program agree with PyTorch, programs with each other to the bit, bytes \
    are as predicted, bad input and dead ranks lose nothing
# Every claim about correctness, memory and bytes on the CPU once, some minutes. TESTS='-k tp' chooses.
test: test-programs
	@built=$(SECONDS_SINCE); echo "the programs are built, in $$built s; now the tests"; $(RUN_TESTS) --tier quick && \
	    echo "make test passed in $(SECONDS_SINCE) s, of which $$built s built the programs:" \
	    "$(if $(TESTS),the tests that TESTS chose,$(RELIED_ON))."
# Everything: further ranks and shapes, sanitizers, thread races, emulated kernels, mistakes on purpose, fuzzing,
# Hugging Face's libraries.
test-all: test-all-programs
	@$(RUN_TESTS) --durations=20 --tier all
	@echo "make test-all passed in $(SECONDS_SINCE) s: $(RELIED_ON); also under sanitizers and on emulated GPUs, and" \
	    "mistakes made on purpose are caught."
# The files of the commit choose a part of what test-all adds to test: a tenth of long tables, a fifth of all else.
test-rest: test-all-programs
	@$(RUN_TESTS) --durations=20 --tier rest --part
# Programs differ only where they must; how much there is to read from one to the next.
check-programs:
	@$(PYTEST) -q -s test/test_programs.py
