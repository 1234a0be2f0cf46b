#!/bin/bash
# The variants of dev/cuda/'s kernels, where there is no GPU: under the emulator, with the address sanitizer, each gives the CPU
# layer's numbers at every block size. The check reports a variant that is wrong, and only that one.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr; do [ -e "$folder/include/cuda_runtime.h" ] && cuda=$folder; done
[ -n "${cuda:-}" ] || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
CPPFLAGS=$(sh dev/find_cuda.sh compile cublasLt cudnn 2> "$work/said") || { echo "1..0 # SKIP $(head -n 1 "$work/said")"; exit 0; }
export CPPFLAGS OMP_NUM_THREADS=1

# compile SOURCE PRECISION PROGRAM: without optimisation, because compiling takes longer than running.
compile() {
    local layers=$work/cpu_layers-$2.o
    [ -e "$layers" ] || gcc -std=c11 -O0 -march=native -fopenmp -ffp-contract=off -DPRECISION_"${2^^}" \
        -c test/unit/cpu_layers.c -o "$layers" || return 1
    EMULATOR_LIBRARIES="cublaslt cudnn" sh dev/emulator/compile.sh "$1" "$3" asan -DPRECISION_"${2^^}" -DUSE_CUDNN=1 -Idev/cuda \
        "$layers" -ldnnl -fopenmp -O0
}
# results: name and result of each variant, from the table on stdin.
results() { sed -n 's/^| \([a-z_]*_[0-9]_[a-z_]*\) | .* | \([^|]*\) |$/\1: \2/p'; }
# all_right SOURCE PROGRAM OPTION...: every variant in the file's table was checked and is right.
all_right() {
    local source=$1
    shift
    "$@" > "$work/said" || { cat "$work/said"; return 1; }
    results < "$work/said" | tee "$work/results"
    [ "$(grep -c ': right$' "$work/results")" -eq "$(grep -c '^    { "' "$source")" ] && [ -s "$work/results" ]
}
# Where a row is not a whole number of 16-byte pieces, some variants are not offered, and the others are right.
odd_shape_right() {
    "$@" > "$work/said" || { cat "$work/said"; return 1; }
    results < "$work/said" | tee "$work/results"
    grep -q ': right$' "$work/results" && ! grep -vq ': right$\|: not offered$' "$work/results"
}

precisions=(bf16 fp32)
for source in dev/cuda/*.cu; do
    name=$(basename "$source" .cu)
    [ "$name" != bench_layers ] || continue
    precision=${precisions[$((tests / 3 % 2))]} # the files take turns with the precisions
    program=$work/$name shape=()
    case $name in attention_*) precision=bf16 shape=(--rows 35 --cols 128) ;; esac # for tensor cores; few tokens, because pairs of them take long
    case $name in matmul_*) precision=bf16 ;; esac
    check "$name, $precision: compiles" compile "$source" "$precision" "$program"
    check "$name, $precision: every variant is right" all_right "$source" "$program" "${shape[@]}"
    check "$name, $precision: also with an odd shape" odd_shape_right "$program" --rows 3 --cols 131
done

# More tiles than fit in shared memory at a time; heads of a size other than 64.
other_shapes_of_attention() {
    odd_shape_right "$work/attention_forward" --rows 131 --cols 64 --variant prefetch &&
        odd_shape_right "$work/attention_forward" --rows 300 --cols 64 --variant hopper &&
        odd_shape_right "$work/attention_backward" --rows 67 --cols 64 --variant tensor &&
        odd_shape_right "$work/attention_backward" --rows 67 --cols 64 --variant atomics || return 1
    local direction
    for direction in forward backward; do
        odd_shape_right "$work/attention_$direction" --rows 21 --cols 40 || return 1
        [ "$(grep -c ': right$' "$work/results")" -ge 4 ] || return 1
    done
}
check "attention over many tiles, and with other heads" other_shapes_of_attention

# Products: pipelined variants need several tiles, and more steps than can be in flight at once; in fp32 all variants but those
# with tensor cores are offered.
several_tiles() { # NAME VARIANT
    "$work/$1" --variant "$2" --rows 264 --cols 136 --depth 328 > "$work/said" || { cat "$work/said"; return 1; }
    [ "$(results < "$work/said" | grep -c "$2: right\$")" -eq 1 ]
}
fp32_product() {
    compile dev/cuda/matmul_forward.cu fp32 "$work/product" && "$work/product" > "$work/said" || return 1
    results < "$work/said" | tee "$work/results"
    [ "$(grep -c ': right$' "$work/results")" -eq 6 ] && [ "$(grep ': not offered$' "$work/results" | tr -d '\n')" = \
        "matmul_forward_6_tensor_cores: not offeredmatmul_forward_7_hopper: not offered" ]
}
# A wait for one tile fewer, and a buffer that is refilled without waiting.
broken_pipelines_are_told() {
    cp dev/cuda/matmul_*.cuh dev/cuda/matmul_forward.cu "$work"
    sed -i 's/__pipeline_wait_prior(MMA_STAGES - 2)/__pipeline_wait_prior(MMA_STAGES - 1)/' "$work/matmul_tensor_cores.cuh"
    sed -i 's/mbarrier_wait(&empty\[stage\], round % 2 ^ 1)/(void)empty, (void)round/' "$work/matmul_hopper.cuh"
    for part in tensor_cores hopper; do cmp -s "$work/matmul_$part.cuh" "dev/cuda/matmul_$part.cuh" && return 1; done
    compile "$work/matmul_forward.cu" bf16 "$work/broken" || return 1
    "$work/broken" --variant tensor_cores | tee "$work/said"
    [ "$(results < "$work/said")" = "matmul_forward_6_tensor_cores: WRONG at 256" ] || return 1
    ! "$work/broken" --variant hopper 2> "$work/said" && cat "$work/said" &&
        grep -q "matmul_hopper.cuh:[0-9]*: one arrival more than the 1 that make a phase" "$work/said"
}
for name in matmul_forward matmul_backward; do
    for variant in tensor_cores hopper; do check "$name: $variant, several tiles" several_tiles "$name" "$variant"; done
done
check "matmul_forward, fp32: all but the tensor cores are right" fp32_product
check "broken pipelines are reported" broken_pipelines_are_told

# The lanes' sums of squares, which the second kernel must add up, stay separate.
broken_is_told() {
    sed '/^__global__ void warp_kernel/,/^}/s/warp_sum(square)/square/' dev/cuda/layernorm_forward.cu > "$work/broken.cu"
    not cmp -s "$work/broken.cu" dev/cuda/layernorm_forward.cu && compile "$work/broken.cu" fp32 "$work/broken" || return 1
    "$work/broken" > "$work/said"
    local status=$?
    cat "$work/said"
    [ "$status" -eq 1 ] || return 1
    results < "$work/said" > "$work/results"
    [ "$(grep -c ': right$' "$work/results")" -eq 4 ] &&
        grep -q '^layernorm_forward_2_warp: WRONG at 32 64 128 256 512 1024$' "$work/results" &&
        grep -q 'element 0 of' "$work/said"
}
one_variant() {
    "$work/adamw" --variant 1_naive > "$work/said" || return 1
    [ "$(results < "$work/said")" = "adamw_1_naive: right" ]
}
bad_options() {
    fails_with "no variant has 'nothing' in its name" -- "$work/adamw" --variant nothing || return 1
    fails_with "rows must be a number from 1 to .*, not '0'" -- "$work/adamw" --rows 0 || return 1
    fails_with "there is no option '--shape'" -- "$work/adamw" --shape 3 || return 1
    fails_with "cols needs a value" -- "$work/adamw" --cols
}
check "a broken variant is reported, with the block sizes, and the others are right" broken_is_told
check "one variant alone" one_variant
check "unknown options and bad values are errors" bad_options
check "--help" sh -c '"$1" --help | grep -q "^--repetitions"' - "$work/adamw"
done_testing
