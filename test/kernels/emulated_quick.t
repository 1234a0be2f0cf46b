#!/bin/bash
# Each kernel of llmc/device/cuda/ once, where there is no GPU: it agrees with the CPU's layers under the emulator, in bf16. (cuda_*.t have
# other precisions, sanitizers, and products and attention by NVIDIA's libraries; emulated_*.t have whole runs.)
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
compile() {
    EMULATOR_LIBRARIES= sh dev/emulator/compile.sh test/unit/test_cuda_kernels.cu "$work/kernels" plain -DPRECISION_BF16 -DUSE_CUDNN=0 \
        "$work/cpu_layers.o" -ldnnl -fopenmp
}
# The program ran to its end, and each of its tests, several of them, is ok.
all_ok() {
    "$work/kernels" quick > "$work/said" 2>&1 || { cat "$work/said"; return 1; }
    cat "$work/said"
    local plan
    plan=$(sed -n 's/^1\.\.//p' "$work/said")
    [ "${plan:-0}" -ge 2 ] && [ "$(grep -c '^ok ' "$work/said")" -eq "$plan" ]
}
check "the CPU's layers and the emulator compile" build_parts
check "the test compiles" compile
check "each kernel agrees with the CPU's layers" all_ok
done_testing
