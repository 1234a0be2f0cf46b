#!/bin/bash
# The kernels and matrix products of llmc/device/cuda/ against the CPU's layers, where there is no GPU: under the emulator, with the
# address sanitizer in fp32 and bf16 (it finds everything that a plain build does), with the race detector in bf16 (kernels of
# other precisions differ in conversions and elements per load, not in barriers; the stand-in for cuBLASLt has no races to find),
# and in fp16, which has bf16's sizes, in a plain build.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr; do [ -e "$folder/include/cuda_runtime.h" ] && cuda=$folder; done
[ -n "${cuda:-}" ] || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
export work
export OMP_NUM_THREADS=1 # the CPU's layers in these programs use one thread
setarch -R true 2> /dev/null && without_aslr="setarch -R" # ThreadSanitizer cannot start in some address layouts
export without_aslr="${without_aslr:-}"

# Builds what the programs are linked with: the CPU's layers once per precision, the emulator once per build.
build_parts() {
    local precision build
    for precision in fp32 bf16 fp16; do
        gcc -std=c11 -O2 -g -march=native -fopenmp -ffp-contract=off -Wall -Wextra -Werror -DPRECISION_${precision^^} \
            -c test/unit/cpu_layers.c -o "$work/cpu_layers-$precision.o" || return 1
    done
    printf '__global__ void k() {}\n' > "$work/nothing.cu"
    for build in plain asan tsan; do
        sh dev/emulator/compile.sh "$work/nothing.cu" "$work/nothing.o" $build || return 1 # makes the emulator itself
    done
}
# compile_and_run TEST BUILD PRECISION: the output goes to a log, whose last line has the program's status.
compile_and_run() {
    local program=$work/$1-$2-$3 how=
    [ "$2" = tsan ] && how=quick
    [ "$1" = test_cuda_matmul ] && export EMULATOR_LIBRARIES=cublaslt
    { sh dev/emulator/compile.sh "test/unit/$1.cu" "$program" "$2" -DPRECISION_"${3^^}" "$work/cpu_layers-$3.o" \
            -ldnnl -fopenmp && $without_aslr "$program" $how
      echo "status $?"; } > "$program.log" 2>&1
    rm -f "$program" "$program.ii"
}
export -f compile_and_run
# The program ran to its end; it has several tests, and each is ok.
all_ok() {
    cat "$1"
    [ "$(tail -n 1 "$1")" = "status 0" ] || return 1
    local plan
    plan=$(sed -n 's/^1\.\.//p' "$1")
    [ "${plan:-0}" -ge 2 ] && [ "$(grep -c '^ok ' "$1")" -eq "$plan" ]
}

check "the CPU's layers and the emulator compile" build_parts
for test in test_cuda_kernels test_cuda_compress; do
    for run in "tsan bf16" "asan fp32" "asan bf16" "plain fp16"; do echo "$test $run"; done
done > "$work/list"
if CPPFLAGS=$(sh dev/find_cuda.sh compile cublasLt 2> "$work/said"); then
    export CPPFLAGS
    for run in "asan fp32" "asan bf16" "plain fp16"; do echo "test_cuda_matmul $run"; done >> "$work/list"
else
    skip "matrix products" "$(head -n 1 "$work/said")"
fi
xargs -P "$(nproc)" -L 1 bash -c 'compile_and_run "$@"' - < "$work/list" # the long ones first
while read -r test build precision; do
    check "$build: $test, $precision" all_ok "$work/$test-$build-$precision.log"
done < "$work/list"
done_testing
