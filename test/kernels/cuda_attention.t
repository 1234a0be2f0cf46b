#!/bin/bash
# Attention through cuDNN's graphs where there is no GPU: the emulator's interpreter computes the graphs that
# llmc/device/cuda/attention_cudnn.cuh builds, and the CPU's layer checks them. Also which attention is chosen when, and what is said
# where cuDNN cannot compute it.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
CPPFLAGS=$(sh dev/find_cuda.sh compile cudnn 2> "$work/said") || { echo "1..0 # SKIP $(tail -n 1 "$work/said")"; exit 0; }
for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr; do [ -e "$folder/include/cuda_runtime.h" ] && cuda=$folder; done
[ -n "${cuda:-}" ] || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
export CPPFLAGS EMULATOR_LIBRARIES=cudnn OMP_NUM_THREADS=1

compile() { # PRECISION BUILD
    gcc -std=c11 -O2 -g -march=native -fopenmp -ffp-contract=off -Wall -Wextra -Werror -DPRECISION_"${1^^}" \
        -c test/unit/cpu_layers.c -o "$work/cpu_layers.o" &&
        sh dev/emulator/compile.sh test/unit/test_cuda_attention.cu "$work/attention-$1" "$2" -DPRECISION_"${1^^}" -DUSE_CUDNN=1 \
            "$work/cpu_layers.o" -ldnnl -fopenmp
}
# run PRECISION TESTS: exactly TESTS tests run, under two seeds, and all are ok.
run() {
    local seed
    for seed in 1 2; do
        CUDA_EMULATOR_SEED=$seed "$work/attention-$1" > "$work/said" 2>&1 || { cat "$work/said"; return 1; }
        cat "$work/said"
        [ "$(grep -c '^ok ' "$work/said")" -eq "$2" ] || return 1
    done
}
says() { # PATTERN PRECISION CHOICE HS [T]
    "$work/attention-$2" choose "$3" "$4" "${5:-8}" > "$work/said" 2>&1
    cat "$work/said"
    grep -qx "$1" "$work/said"
}

check "bf16, with the address sanitizer: it compiles" compile bf16 asan
check "bf16, with the address sanitizer: attention agrees with the CPU's" run bf16 5
check "fp16: it compiles" compile fp16 plain
check "fp16: attention agrees with the CPU's" run fp16 5
check "fp32: it compiles" compile fp32 plain
check "fp32: attention is our own" run fp32 2
check "auto chooses cuDNN's" says 'cuDNN [0-9.]* attention' bf16 auto 16
check "own chooses our own" says 'own attention in fp32 arithmetic' bf16 own 16
check "and with heads of 64 channels on tensor cores" says 'own attention on tensor cores' bf16 own 64
check "auto says why it is not cuDNN's" says 'own attention in fp32 arithmetic (cuDNN: .* multiple of 8)' bf16 auto 12
check "and in fp32" says 'own attention in fp32 arithmetic (cuDNN: its attention is for bf16 and fp16, not for fp32)' fp32 auto 16
check "cudnn dies where cuDNN refuses" fails_with "attention cudnn: cuDNN cannot be used: .* multiple of 8" "attention own" -- \
    "$work/attention-bf16" choose cudnn 12 8
check "and in fp32" fails_with "not for fp32" -- "$work/attention-fp32" choose cudnn 16 8
check "heads that are too large for either are an error" fails_with "heads of 136 channels, but at most 128" "more --heads" -- \
    "$work/attention-bf16" choose auto 136 8
# What NVIDIA's front end refuses or works around: 9.10.0 and 9.10.1; up to 9.15.0 lengths that are not a multiple of 128
by_version() { CUDA_EMULATOR_CUDNN=$1 says "$2" bf16 auto 16 "${3:-128}"; }
too_old='libcudnn.so.9 is cuDNN 9\..*, but the minimum is 9.10.2, because attention in earlier ones has bugs; install .*'
for version in 90905 91000 91001; do
    check "cuDNN $version is refused" by_version $version "own attention .*(cuDNN: $too_old)"
done
for version in 91002 91500; do
    check "cuDNN $version is used" by_version $version "cuDNN 9.1[0-9.]* attention"
    check "  but not for a length that is not a multiple of 128" \
        by_version $version 'own attention .*(cuDNN: before 9.15.1 it has a bug where T is not a multiple of 128)' 65
done
check "cuDNN 9.15.1 takes that length" by_version 91501 'cuDNN 9.15.1 attention' 65
check "and none takes a single token" by_version 91900 \
    'own attention .*(cuDNN: its backward does not support sequences of one token)' 1
done_testing
