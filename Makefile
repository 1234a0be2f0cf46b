# make                      the training programs of every stage, and the default data
# make train_gpt2_single    one of them; then ./train_gpt2_single
# make demo | test | bench | doctor | fuzz | test-interop | cuda-objects | clean
#
# DEVICE=cpu|cuda           where it runs; default: cuda where nvcc, a GPU and llmc/cuda/ are there, else cpu
# PRECISION=fp32|bf16|fp16  of parameters, activations and gradients
# DEBUG=1                   for gdb, with the sanitizers for addresses and undefined behaviour

# --- what to build, and where: each combination has a folder of its own, so switching rebuilds nothing ---
GPU := $(shell command -v nvcc >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
DEVICE ?= $(if $(and $(GPU),$(wildcard llmc/cuda/layers.cuh)),cuda,cpu)
PRECISION ?= fp32
variant := $(strip $(filter-out cpu fp32,$(DEVICE) $(PRECISION)) $(if $(DEBUG),debug))
empty :=
comma := ,
BUILD := build$(if $(variant),/$(subst $(empty) $(empty),-,$(variant)))

ifeq ($(filter fp32 bf16 fp16,$(PRECISION)),)
$(error PRECISION must be fp32, bf16 or fp16, not '$(PRECISION)')
endif
ifneq ($(DEVICE),cpu)
ifeq ($(wildcard llmc/cuda/layers.cuh),)
$(error DEVICE must be cpu, not '$(DEVICE)': llmc/cuda/, the layers on an NVIDIA GPU, is not there yet)
endif
endif

# --- compiler and libraries ---
WARNINGS := -Wall -Wextra -Werror
# No -ffast-math: sums would depend on the compiler's mood. No contraction: code that wants fma says so. No errno from
# sqrtf, which nobody reads and which would keep AdamW from being vector code.
OPTIMISE := $(if $(DEBUG),-O1 -g -fsanitize=address$(comma)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer,-O3)
PRECISION_FLAG := -DPRECISION_$(shell echo $(PRECISION) | tr a-z A-Z)
CFLAGS_ALL = -std=c11 $(OPTIMISE) -march=native -ffp-contract=off -fno-math-errno -fopenmp $(PRECISION_FLAG) $(WARNINGS) -MMD -MP $(CFLAGS)
LIBRARIES := -ldnnl -ljansson -lpcre2-8 -lpthread -lm

STAGES := $(patsubst %.cu,%,$(wildcard train_gpt2_*.cu))
TOOLS := tokenize train_bpe hf_export hf_import llmc_import
C_TESTS := $(patsubst test/%.c,%,$(wildcard test/test_*.c))

all: $(STAGES)

# The program under the name that one types. It is only a link, so that it follows the last PRECISION or DEBUG asked for.
$(STAGES): %: $(BUILD)/% data/train.bin
	@ln -sf $< $@

# A stage file is C to the CPU's compiler.
$(BUILD)/train_gpt2_%: train_gpt2_%.cu
	@mkdir -p $(@D)
	$(CC) -x c $(CFLAGS_ALL) $< -o $@ $(LDFLAGS) $(LIBRARIES)

tools: $(TOOLS:%=$(BUILD)/%)
$(TOOLS:%=$(BUILD)/%): $(BUILD)/%:
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $< -o $@ $(LDFLAGS) $(LIBRARIES)
$(BUILD)/tokenize: dev/data/tokenize.c
$(BUILD)/train_bpe: dev/data/train_bpe.c
$(BUILD)/hf_export: dev/hf_export.c
$(BUILD)/hf_import: dev/hf_import.c
$(BUILD)/llmc_import: dev/llmc_import.c

# The default data: this repository's own text as bytes. Made once, so that runs can be compared; `make clean-data` to renew.
data/train.bin: | build/tokenize
	sh dev/data/default.sh data build/tokenize
ifneq ($(BUILD),build)
build/tokenize:
	$(MAKE) --no-print-directory DEVICE=cpu PRECISION=fp32 DEBUG= build/tokenize
endif

# --- for people ---
demo: train_gpt2_single
	sh dev/demo.sh
doctor:
	sh dev/doctor.sh
bench: build/train_gpt2_single
	$(MAKE) --no-print-directory PRECISION=bf16 DEBUG= build/bf16/train_gpt2_single
	sh dev/bench.sh

# --- tests ---
$(C_TESTS:%=$(BUILD)/test/%): $(BUILD)/test/%: test/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $< -o $@ $(LDFLAGS) -lcmocka $(LIBRARIES)
# Layers one by one, within a whole step: build/bench_layers [B T [steps]].
$(BUILD)/bench_layers: dev/cpu/bench_layers.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $< -o $@ $(LDFLAGS) $(LIBRARIES)
$(BUILD)/test/compare_run: test/compare_run.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $< -o $@ $(LDFLAGS) $(LIBRARIES)

# The loader's thread under ThreadSanitizer.
build/tsan/test/test_dataloader: test/test_dataloader.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -O1 -g -fsanitize=thread -march=native -fopenmp $(WARNINGS) -MMD -MP $< -o $@ -lcmocka $(LIBRARIES)

# libFuzzer targets of the three readers. A reader's die() calls exit(); the target wraps it and returns to the fuzzer.
FUZZERS := tokens tokenizer safetensors
$(FUZZERS:%=build/fuzz/%): build/fuzz/%: test/fuzz_%.c
	@mkdir -p $(@D)
	clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined $(WARNINGS) -MMD -MP $< -o $@ -Wl,--wrap=exit -ljansson -lpcre2-8 -lpthread -lm
fuzz: $(FUZZERS:%=build/fuzz/%)
	sh test/fuzz.sh $(or $(FUZZ_SECONDS),60)

# Everything that the tests run, in one build.
test-build: $(STAGES:%=$(BUILD)/%) $(TOOLS:%=$(BUILD)/%) $(C_TESTS:%=$(BUILD)/test/%) $(BUILD)/test/compare_run
PRECISION_TESTS := train_gpt2_single test/test_layers test/test_reference_layers
test: data/train.bin
	$(MAKE) --no-print-directory test-build build/tsan/test/test_dataloader build/bench_layers $(if $(shell command -v clang),$(FUZZERS:%=build/fuzz/%))
	$(MAKE) --no-print-directory DEBUG=1 test-build
	$(MAKE) --no-print-directory PRECISION=bf16 $(PRECISION_TESTS:%=build/bf16/%)
	$(MAKE) --no-print-directory PRECISION=fp16 $(PRECISION_TESTS:%=build/fp16/%)
	$(MAKE) --no-print-directory PRECISION=bf16 DEBUG=1 $(PRECISION_TESTS:%=build/bf16-debug/%)
	$(MAKE) --no-print-directory PRECISION=fp16 DEBUG=1 $(PRECISION_TESTS:%=build/fp16-debug/%)
	sh test/run.sh
test-interop: build/train_gpt2_single $(TOOLS:%=build/%) data/train.bin
	sh test/interop/run.sh

# The plain headers and the stage files must stay CUDA source: compiled, not linked, wherever nvcc is.
NVCC ?= nvcc
cuda-objects: $(STAGES:%=build/cuda-objects/%.o)
build/cuda-objects/%.o: %.cu $(wildcard llmc/*.h)
	@mkdir -p $(@D)
	$(NVCC) -x cu -std=c++17 -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -c $< -o $@

clean:
	rm -rf build $(STAGES)
clean-data:
	rm -rf data
.PHONY: all tools demo doctor bench fuzz test test-build test-interop cuda-objects clean clean-data $(STAGES)
.DELETE_ON_ERROR:
.SUFFIXES:
-include $(wildcard $(BUILD)/*.d $(BUILD)/test/*.d build/tsan/test/*.d build/fuzz/*.d)
