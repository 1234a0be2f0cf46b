#!/bin/bash
# dev/cuda/bench_layers.cu without a GPU: its counts are those of the formulas; under the emulator, every operation runs, a step
# that waits for the GPU is reported, and a CUDA graph of the step leaves the same bits.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
sh dev/emulator/find_headers.sh > /dev/null 2>&1 || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
flags=$(sh dev/find_cuda.sh compile cublasLt cudnn 2> /dev/null) || { echo "1..0 # SKIP cuBLAS or cuDNN is not here"; exit 0; }

compile() { # SOURCE PROGRAM
    CPPFLAGS="$flags" EMULATOR_LIBRARIES="cublaslt cudnn" sh dev/emulator/compile.sh "$1" "$2" plain \
        -DPRECISION_BF16 -DUSE_CUDNN=1 -O0 -ljansson -lpcre2-8 -lpthread -lm
}
bench=$work/bench_layers
check "it compiles for the emulator" compile dev/cuda/bench_layers.cu "$bench"

# --- what follows from shapes alone ---
count() { "$bench" --floors "$@" > "$work/table" || { cat "$work/table"; return 1; }; }
says() { grep -qe "$1" "$work/table" || { cat "$work/table"; echo "it did not say '$1'"; return 1; }; }
# B=2, T=512 of GPT-2: N=1024, C=768. qkv: 12 x 2 N C 3C = 43.5 GFLOP; of bytes 12 x 2 x (NC + 3CC + 3NC) = 0.118 GB: 369 FLOPs a
# byte, at 100 TFLOP/s and 1 TB/s bound by arithmetic, 0.435 ms; at 1000 TFLOP/s by memory, 0.118 ms.
products_are_counted() {
    count 100 1000 2 512 && says '^| qkv forward | 12 | 43.5 | 0.12 | 369 | compute | 0.435 |' &&
        count 1000 1000 2 512 && says '^| qkv dW + bias | 12 | 43.5 | 0.12 | 369 | memory | 0.118 |'
}
# 25 layernorms of 4 N C bf16 numbers and 2 N floats: 0.158 GB. AdamW: 28 bytes for each of 124475904 parameters.
bytes_are_counted() {
    count 100 1000 2 512 && says '^| residual + layernorm forward | 25 | 0.0 | 0.16 | - | memory | 0.157 |' &&
        says '^| AdamW, all units at once | 1 | 0.0 | 3.49 | - | memory | 3.485 |'
}
# All products and attention are 6 N + 6 L C T FLOPs a token, where N counts only products' weights: 12 C C in each block and
# C Vp in the head. 6 (12 x 12 x 768 x 768 + 768 x 50304) + 6 x 12 x 768 x 512 = 769720320 a token.
sum_is_the_formula() {
    count 100 1000 2 512 && says '^| sum | 247 | 788.2 | ' && says '^6 N + 6 L C T: 793.5 GFLOP a step'
    # shares are of the floors, and add up
    awk -F'|' '$2 !~ /sum|operation/ && $9 ~ /%/ { sum += $9; rows++ }
               END { print rows, sum; exit !(rows == 26 && sum > 99.5 && sum < 100.5) }' "$work/table"
}
recomputed_twice() {
    count 100 1000 2 512 && cp "$work/table" "$work/once" && count 100 1000 --recompute 2 512 &&
        says '^| qkv forward | 24 | 87.0 |' &&
        says '^| attention forward | 24 |' && says '^| residual + layernorm forward | 49 |' && says '^| fcproj forward | 12 |' &&
            says '^| fc dX | 12 |'
}
a_larger_model() { count 989 3350 --model gpt2-xl 16 1024 && says '^gpt2-xl, bf16, B=16, T=1024$' &&
    says '^| AdamW, all units at once | 1 | 0.0 | 43.62 |' && says '| qkv forward | 48 |'; }
bad_options() {
    fails_with "needs two rates, TFLOP/s and GB/s, not 'x'" -- "$bench" --floors 989 x &&
        fails_with "needs two rates.*not ''" -- "$bench" --floors 989 &&
        fails_with "usage: bench_layers .*, not '--what'" -- "$bench" --what &&
            fails_with "there is no model 'gpt5'" -- "$bench" --model gpt5 &&
        fails_with "not 1 numbers" -- "$bench" 4 && fails_with "whole numbers from 1, not '0'" -- "$bench" 0 16 &&
            fails_with "T must be at most 1024" -- "$bench" 1 1025
}
# doc/gpu.md shows what its command prints.
document_is_current() {
    count 989 3350 32 1024 && sed -i '1,2d' "$work/table" && sed -i 's/^6 N/    &/' "$work/table" &&
        sed -n '/^| operation | calls/,/^    6 N/p' doc/gpu.md > "$work/quoted" &&
        diff "$work/quoted" "$work/table"
}
check "products: FLOPs, bytes, and what bounds them at which rates" products_are_counted
check "operations that only move memory: bytes" bytes_are_counted
check "the sum is MFU's formula, and shares add up" sum_is_the_formula
check "with recomputation most of a block's forward pass is counted twice" recomputed_twice
check "another model" a_larger_model
check "odd options are refused" bad_options
check "the table in doc/gpu.md" document_is_current

# --- run under the emulator, where times mean nothing ---
small=(--model d1 --vocab-size 100 1 8 1)
measured() {
    "$bench" "${small[@]}" > "$work/table" || { cat "$work/table"; return 1; }
    says '^peaks: copy [0-9]* GB/s, product [0-9.]* TFLOP/s, data sheet [0-9.]* TFLOP/s$' && says '^measured: ' &&
        awk -F'|' '$2 !~ /sum|operation|---/ && NF == 13 { rows++; timed += $9 > 0 }
                   END { print rows, timed; exit !(rows == 26 && timed == 26) }' "$work/table"
}
no_wait() {
    grep '^- ' "$work/table" && [ "$(grep -c '^- .*, and the host does not wait for the GPU meanwhile$' "$work/table")" = 3 ]
}
graph_is_the_step() {
    says '^The step takes the GPU [0-9.]* ms, as a graph [0-9.]* ms: a CUDA graph [a-z]* [0-9.]* %\.$' &&
        says '^The graph is the same step: .* the same bits\.$'
}
# A step that waits, or one with an argument that changes each time.
broken_steps() {
    sed '/^        gpt2_backward(&g, 1.0f \/ (float)n);$/c\
        static float weight = 1;\
        if (getenv("WAITS")) device_synchronize(); else weight *= 0.5f;\
        gpt2_backward(&g, weight);
        s/HELD_SECONDS 5.0/HELD_SECONDS 0.5/' dev/cuda/bench_layers.cu |
        sed "s|#include \"../../|#include \"$PWD/|" > "$work/broken.cu"
    compile "$work/broken.cu" "$work/broken"
}
a_wait_is_told() {
    WAITS=1 "$work/broken" "${small[@]}" > "$work/table" &&
        says '^- all of its kernels: the host WAITS for the GPU meanwhile$' && says '^- its batch: issued in .* does not wait' &&
        says '^It takes the GPU [0-9.]* ms; what waits cannot be a CUDA graph\.$'
}
another_step_is_an_error() {
    fails_with "the graph is not the step, .*loss \([0-9.]*\) and \1, .*gradients different, moments different" -- \
        "$work/broken" "${small[@]}"
}
only_peaks() { "$bench" --peaks > "$work/table" && [ "$(wc -l < "$work/table")" = 1 ] &&
    says '^peaks: copy [0-9]* GB/s, product [0-9.]* TFLOP/s, data sheet [0-9.]* TFLOP/s$'; }
check "every operation is run" measured
check "the host issues a step without waiting for the GPU" no_wait
check "a CUDA graph of the step leaves its bits" graph_is_the_step
check "broken steps compile" broken_steps
check "  one that waits is reported" a_wait_is_told
check "  one that changes each time, so that its graph has other bits, is an error" another_step_is_an_error
check "only the GPU's peak rates" only_peaks
done_testing
