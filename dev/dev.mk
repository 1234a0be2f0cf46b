# Tools, the planner, benchmarks, and each layer in several versions. Included by ../Makefile.

# --- tools ---
TOOLS := tokenize train_bpe convert schedule_order
CONVERTERS := hf_export hf_import llmc_import verify
PYTHON_TOOLS := advise overlap ranks schedule
COMMANDS += tools
C_BUILDS += $(TOOLS:%=$(BUILD)/%)
tools: $(addprefix $(BUILD)/,$(TOOLS) $(CONVERTERS) $(PYTHON_TOOLS) plan)
$(addprefix $(BUILD)/,tokenize train_bpe): $(BUILD)/%: dev/data/%.c
$(addprefix $(BUILD)/,convert schedule_order): $(BUILD)/%: dev/tools/%.c
# One program, whose name says which conversion it does.
$(CONVERTERS:%=$(BUILD)/%): $(BUILD)/convert
	@ln -sf $(<F) $@
# A tool in Python is linked under its name, and imports the files next to the script.
$(PYTHON_TOOLS:%=$(BUILD)/%): $(BUILD)/%: dev/tools/%.py
	@mkdir -p $(@D)
	@ln -sf $(if $(variant),../)../$< $@
$(BUILD)/schedule: | $(BUILD)/schedule_order

# build/plan, whose code is dev/plan, and the programs that it asks: schedule_order, and the training programs'
# --predict, without MPI. All of these take 179 s of one core to compile with -O3, 82 s with -O1 and 27 s with -O0,
# and the planner's longest search takes one second with any of them.
PLAN_PROGRAMS := $(foreach p,fp32 bf16,$(RANKS_PROGRAMS:%=%.$p)) $(addsuffix .fp16,train_gpt2_compress train_gpt2_muon)
PLAN_PROGRAMS := $(PLAN_PROGRAMS:%=$(BUILD)/predict/%)
C_BUILDS += $(PLAN_PROGRAMS)
$(BUILD)/plan: dev/dev.mk $(PLAN_PROGRAMS) $(BUILD)/schedule_order
	@printf '#!/bin/sh\nexport PLAN_PROGRAMS="$$(dirname -- "$$0")/predict" PYTHONSAFEPATH=1\n%s"%s:%s"\n%s\n' 'export PYTHONPATH=' \
	    "$(CURDIR)" "$(CURDIR)/dev/tools" 'exec python3 -m dev.plan "$$@"' >$@
	@chmod +x $@
$(PLAN_PROGRAMS): PRECISION_FLAG = -DPRECISION_$(shell echo $(patsubst .%,%,$(suffix $@)) | tr a-z A-Z)
$(PLAN_PROGRAMS): OPTIMISE := $(subst -O3,-O0,$(OPTIMISE))
.SECONDEXPANSION:
$(PLAN_PROGRAMS): $(BUILD)/predict/%: $$(basename $$*).cu

# --- benchmarks ---
# Layers one by one, within a whole step: build/bench_layers --help.
$(BUILD)/bench_layers: $(if $(filter cpu,$(DEVICE)),dev/kernels/cpu/bench_layers.c,dev/kernels/cuda/bench_layers.cu)
# Collectives, how fast they are and whether they are right: for mpirun, on whatever ranks have.
$(BUILD)/comm_bench: dev/kernels/comm/comm_bench.cu
# The kernels that compress gradients, next to a copy: build/bench_compress --help.
$(BUILD)/bench_compress: dev/kernels/bench_compress.cu
DEVICE_BUILDS += $(addprefix $(BUILD)/,bench_layers comm_bench bench_compress)
WITH_MPI += $(BUILD)/comm_bench

# --- each layer in several versions, from naive to llmc/'s: checked, and timed ---
COMMANDS += variants run-variants cpu-variants run-cpu-variants
CPU_VARIANTS := $(patsubst dev/kernels/cpu/%.c,$(BUILD)/cpu_variants/%,\
    $(filter-out %/bench_layers.c,$(wildcard dev/kernels/cpu/*.c)))
C_BUILDS += $(CPU_VARIANTS)
cpu-variants run-cpu-variants: $(CPU_VARIANTS)
$(CPU_VARIANTS): $(BUILD)/cpu_variants/%: dev/kernels/cpu/%.c
VARIANTS := $(patsubst dev/kernels/cuda/%.cu,$(BUILD)/variants/%,\
    $(filter-out %/bench_layers.cu,$(wildcard dev/kernels/cuda/*.cu)))
OTHER_BUILDS += $(VARIANTS) $(BUILD)/variants/cpu_layers.o
variants run-variants: $(VARIANTS)
# wgmma and TMA are what only compute capability 9.0 has, and code for it alone may use.
$(VARIANTS): GENCODE := $(subst compute_90$(comma)code=sm_90,compute_90a$(comma)code=sm_90a,$(GENCODE))
$(VARIANTS): $(BUILD)/variants/%: dev/kernels/cuda/%.cu $(BUILD)/variants/cpu_layers.o $(EMULATOR) | find-libraries
	$(call say,$(COMPILER))
	$(Q)$(BUILD_KERNELS)
# Never with the CPU's sanitizers: nvcc or the emulator links it.
$(BUILD)/variants/cpu_layers.o: OPTIMISE := -O3
$(BUILD)/variants/cpu_layers.o: dev/kernels/cuda/cpu_layers.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS_ALL) -c $< -o $@
run-variants run-cpu-variants:
	@sh dev/kernels/run_variants.sh $^
