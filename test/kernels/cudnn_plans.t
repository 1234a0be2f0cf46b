#!/bin/bash
# The real cuDNN accepts attention's graphs and makes plans for an H100 from them, on a machine without a GPU; and the emulator's
# stand-in gives the same answer to every mistake that it refuses.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr; do [ -e "$folder/include/cuda_runtime.h" ] && cuda=$folder; done
[ -n "${cuda:-}" ] || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
headers=$(sh dev/find_cuda.sh compile cudnn 2> "$work/said") && rpath=$(sh dev/find_cuda.sh rpath cudnn nvrtc) ||
    { echo "1..0 # SKIP $(tail -n 1 "$work/said")"; exit 0; }
plans=test/kernels/cudnn_plans

compile() { # SOURCE OUT FLAG...
    # shellcheck disable=SC2086 # lists of flags
    g++ -std=c++17 -O1 -fopenmp -Wall -Wextra -Werror "$@" -isystem "$cuda/include" $headers $rpath -ldl
}
build_all() {
    gcc -shared -fPIC -Wall -Wextra -Werror -o "$work/libcuda.so.1" -Wl,-soname,libcuda.so.1 $plans/driver.c &&
        compile $plans/plans.cpp -DPRECISION_BF16 -o "$work/bf16" && compile $plans/plans.cpp -DPRECISION_FP16 -o "$work/fp16" &&
        compile $plans/mistakes.cpp -o "$work/mistakes" &&
        CPPFLAGS=$headers EMULATOR_LIBRARIES=cudnn \
            sh dev/emulator/compile.sh $plans/mistakes.cpp "$work/mistakes-emulated"
}
# planned PRECISION B T NH HS [deterministic]: cuDNN finds an engine for both directions.
planned() {
    local precision=$1
    shift
    "$work/$precision" $plans/h100.json "$@" > "$work/said" && [ "$(grep -c ': engine ' "$work/said")" -eq 2 ] && return
    cat "$work/said"
    return 1
}
refused() { # PATTERN PRECISION B T NH HS
    local pattern=$1 precision=$2
    shift 2
    ! "$work/$precision" $plans/h100.json "$@" > "$work/said" && cat "$work/said" &&
        [ "$(grep -c "refused: .*$pattern" "$work/said")" -eq 2 ]
}
backward_bytes() { "$work/bf16" $plans/h100.json "$@" | sed -n 's/^backward: engine [0-9]*, \([0-9]*\) bytes.*/\1/p'; }
deterministic_stores_ds() {
    local any ordered
    any=$(backward_bytes 2 256 4 64) && ordered=$(backward_bytes 2 256 4 64 deterministic)
    echo "$any bytes, deterministic $ordered"
    [ "$any" -lt 65536 ] && [ "$ordered" -ge $((2 * 2 * 4 * 256 * 256)) ]
}
# What cuDNN refuses, the stand-in refuses in the same words; graphs called good are accepted by both.
same_answers() {
    "$work/mistakes" > "$work/real" && "$work/mistakes-emulated" > "$work/emulated" || return 1
    diff "$work/real" "$work/emulated"
    [ "$(wc -l < "$work/real")" -ge 70 ] && [ "$(grep -c '^a good .*SUCCESS' "$work/real")" -ge 6 ] || return 1
    grep -v "SUCCESS" "$work/real" > "$work/refused"
    grep "^a good " "$work/real" > "$work/good"
    ! grep -vxFf "$work/emulated" "$work/refused" "$work/good" # the stand-in prints each of these lines as well
}

check "everything compiles, without nvcc" build_all
export LD_LIBRARY_PATH="$work${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" # has a driver that does nothing
check "the stand-in answers mistakes as cuDNN does" same_answers
"$work/bf16" $plans/h100.json 1 64 1 64 > "$work/said" 2>&1
if grep -q "libnvrtc" "$work/said"; then
    skip "plans for an H100" "NVRTC, which cuDNN compiles with, is not here: sh dev/setup.sh gets it"
    done_testing
    exit
fi
for precision in bf16 fp16; do
    check "GPT-2 124M, $precision" planned $precision 4 1024 12 64
done
check "GPT-2 124M, deterministic" planned bf16 4 1024 12 64 deterministic
check "GPT-2 1558M" planned bf16 1 1024 25 64
check "a length that is not a multiple of 64, heads of 128" planned bf16 2 65 3 128
check "  deterministic" planned fp16 2 65 3 128 deterministic
check "one token" planned bf16 2 1 2 64
check "heads of 80" planned bf16 1 200 2 80
check "heads that are not a multiple of 8 are refused, and the error says why" refused "multiple of 8" bf16 1 100 2 12
check "the deterministic plan stores what the other adds up at once, in any order" deterministic_stores_ds
done_testing
