#!/bin/bash
# Each kernel of llmc/device/cuda/ once, where there is no GPU: kernels, matrix products and attention agree with the CPU's layers under the
# emulator, in bf16. (Other precisions, sanitizers and whole runs are in cuda_*.t and emulated_*.t.)
. test/lib.sh
for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr; do [ -e "$folder/include/cuda_runtime.h" ] && cuda=$folder; done
[ -n "${cuda:-}" ] || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
export OMP_NUM_THREADS=1 # the CPU's layers in these programs use one thread

# The CPU's layers, and the emulator's own parts.
build_parts() {
    gcc -std=c11 -O2 -march=native -fopenmp -ffp-contract=off -DPRECISION_BF16 -c test/unit/cpu_layers.c -o "$work/cpu_layers.o" &&
        printf '__global__ void k() {}\n' > "$work/nothing.cu" &&
        sh dev/emulator/compile.sh "$work/nothing.cu" "$work/nothing.o" plain
}
# compile TEST [LIBRARY]: LIBRARY is the emulator's stand-in.
compile() {
    local headers=
    if [ $# = 2 ]; then headers=$(sh dev/find_cuda.sh compile "$2") || return 1; fi
    CPPFLAGS=$headers EMULATOR_LIBRARIES=$(echo "${2-}" | tr A-Z a-z) sh dev/emulator/compile.sh "test/unit/test_cuda_$1.cu" "$work/$1" plain -DPRECISION_BF16 \
        -DUSE_CUDNN="$([ "${2-}" = cudnn ] && echo 1 || echo 0)" "$work/cpu_layers.o" -ldnnl -fopenmp
}
# all_ok TEST: the program ran to its end, and each of its tests, several of them, is ok.
all_ok() {
    "$work/$1" quick > "$work/said" 2>&1 || { cat "$work/said"; return 1; }
    cat "$work/said"
    local plan
    plan=$(sed -n 's/^1\.\.//p' "$work/said")
    [ "${plan:-0}" -ge 2 ] && [ "$(grep -c '^ok ' "$work/said")" -eq "$plan" ]
}
check "the CPU's layers and the emulator compile" build_parts
for test in "kernels" "matmul cublasLt" "attention cudnn"; do
    read -r name library <<< "$test"
    if [ -n "$library" ] && ! sh dev/find_cuda.sh compile $library > /dev/null 2>&1; then skip "$name" "$library is not here"; continue; fi
    check "$name: the test compiles" compile $test
    check "$name: each agrees with the CPU's layers" all_ok $name
done
done_testing
