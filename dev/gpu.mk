# How a program is compiled for a GPU: as CUDA by nvcc, or for the emulator. Included by ../Makefile unless
# DEVICE=cpu. Each part says how it builds a training program (BUILD_PROGRAM), and variants of kernels with the CPU's
# layers (BUILD_KERNELS).
USE_CUDNN ?= 1
USE_NCCL ?= 1
# The program opens both libraries at run time.
CUDNN := $(if $(filter 0,$(USE_CUDNN)),,cudnn)
NCCL := $(if $(filter 0,$(USE_NCCL)),,nccl)
find-nccl:
	@sh dev/find_cuda.sh compile nccl >/dev/null || { echo "Or build without it: make USE_NCCL=0." >&2; exit 1; }

ifeq ($(DEVICE),cuda)
NVCC ?= nvcc
COMPILER := NVCC
# nvcc hands on one file, in which macros and headers are expanded. There clang warns of a constant compared with
# itself, of functions that this program does not call, even of NVIDIA's, and of loops that it could not vectorise.
NVCC_HOST := $(if $(HOST_CXX),-ccbin $(HOST_CXX)) $(if $(findstring clang,$(HOST_CXX)),-Xcompiler \
    -Wno-tautological-compare$(comma)-Wno-unused-function$(comma)-Wno-pass-failed)
# The GPUs that are here, by compute capability, from 7.5 (T4) on: 75 80 90. Where there are none, the most common
# ones for training, and PTX, which the driver compiles for newer ones. CAPABILITIES="75 90" names others.
HERE := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    grep -xE '7\.5|([89]|[1-9][0-9])\.[0-9]' | tr -d . | sort -u)
CAPABILITIES := $(if $(filter bf16,$(PRECISION)),$(filter-out 75,$(HERE)),$(HERE))
TOO_OLD := $(or $(filter 75,$(CAPABILITIES)),$(if $(CAPABILITIES),,$(filter 75,$(HERE))))
ifneq ($(and $(filter bf16,$(PRECISION)),$(TOO_OLD)),)
$(error bf16 needs a GPU of compute capability 8.0 (A100, RTX 30), and this build is for 7.5 (T4, RTX 20): \
    make PRECISION=fp16 or fp32)
endif
GENCODE := $(foreach c,$(or $(CAPABILITIES),80 90),-gencode arch=compute_$c$(comma)code=sm_$c)
GENCODE += $(if $(CAPABILITIES),,-gencode arch=compute_90$(comma)code=compute_90)
NVCC_FLAGS = -std=c++17 $(if $(DEBUG),-O1 -g -lineinfo -DDEBUG,-O3 -Xcompiler -g1) $(GENCODE) --threads 0 \
    -Xcompiler $(FOR_ARCH) \
    $(if $(STRICT),-Werror all-warnings) -Xcompiler -Wall,-Wextra$(if $(STRICT),$(comma)-Werror) \
    -Xcompiler -fopenmp,-ffp-contract=off,-fno-math-errno \
    $(NVCC_HOST) $(PRECISION_FLAG) -DUSE_CUDNN=$(USE_CUDNN) -MMD -MP -MF $@.d -MT $@ $(NVCCFLAGS)
# Only cuBLASLt is linked. The program opens cuDNN at run time, and can run without it.
BUILD_CUDA = mkdir -p $(@D) && $(CACHE) $(NVCC) $(NVCC_FLAGS) \
    $(shell sh dev/find_cuda.sh compile cublasLt $(CUDNN) $(if $(COMM_CUDA),$(NCCL)))
LINK_CUDA = $(LDFLAGS) $(shell sh dev/find_cuda.sh link cublasLt) \
    $(if $(CUDNN),$(shell sh dev/find_cuda.sh rpath cudnn nvrtc)) \
    $(if $(NCCL),$(shell sh dev/find_cuda.sh rpath nccl 2>/dev/null))
LINK_OBJECT = $(NVCC) $(NVCC_HOST) $(GENCODE) -Xcompiler -fopenmp $@.o -o $@ $(LINK_CUDA)
BUILD_PROGRAM = $(BUILD_CUDA) $(COMM_CUDA) -c $< -o $@.o && $(LINK_OBJECT) $(PROGRAM_LIBRARIES)
# Only compiled: what a program links, as clang's OpenMP, may not be here.
$(BUILD)/train_gpt2_%.o: train_gpt2_%.cu | find-libraries
	$(call say,NVCC)
	$(Q)$(BUILD_CUDA) $(COMM_CUDA) -c $< -o $@
BUILD_KERNELS = $(BUILD_CUDA) -c $< -o $@.o && $(LINK_OBJECT) $(BUILD)/variants/cpu_layers.o -ldnnl -lgomp -lm
FIND_LIBRARIES = sh dev/find_cuda.sh link cublasLt $(CUDNN) >/dev/null || \
    { echo "Or build for the CPU: make DEVICE=cpu. make doctor says what is here." >&2; exit 1; }
endif

# The same source with stand-ins for the GPU and its libraries; only their headers are needed. DEBUG=1 adds the
# address sanitizer, which also sees into kernels.
ifeq ($(DEVICE),emulated)
COMPILER := EMULATE
EMULATOR := $(wildcard dev/emulator/*.cpp dev/emulator/*.h dev/emulator/*.sh dev/emulator/*.pl)
STAND_INS = $(CUDNN) $(if $(COMM_CUDA),$(NCCL))
EMULATE = mkdir -p $(@D) && CPPFLAGS="$(shell sh dev/find_cuda.sh compile cublasLt $(STAND_INS))" \
    EMULATOR_LIBRARIES="cublaslt $(STAND_INS)" sh dev/emulator/compile.sh $< $@ \
    $(if $(DEBUG),asan -DDEBUG,plain) $(PRECISION_FLAG) -DUSE_CUDNN=$(USE_CUDNN)
BUILD_PROGRAM = $(EMULATE) $(COMM_CUDA) $(CFLAGS) $(LDFLAGS) $(PROGRAM_LIBRARIES)
BUILD_KERNELS = $(EMULATE) $(BUILD)/variants/cpu_layers.o $(CFLAGS) $(LDFLAGS) -ldnnl -fopenmp
FIND_LIBRARIES = sh dev/find_cuda.sh compile cublasLt $(CUDNN) >/dev/null
endif
