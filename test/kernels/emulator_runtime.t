#!/bin/bash
# The emulator's CUDA runtime and cuBLASLt find what they claim to find: each deliberate mistake in runtime_selftest.cu gives a
# wrong number or a message with its line, its correct twin is clean in all builds under several seeds, and calls are refused as
# by CUDA.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
sh dev/emulator/find_headers.sh > /dev/null 2>&1 || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
source=dev/emulator/runtime_selftest.cu
if CPPFLAGS=$(sh dev/find_cuda.sh compile cublasLt 2> /dev/null); then
    export CPPFLAGS EMULATOR_LIBRARIES=cublaslt
    with=-DWITH_CUBLASLT
fi
without_aslr=
setarch -R true 2> /dev/null && without_aslr="setarch -R" # ThreadSanitizer cannot start in some address layouts

selftest() { timeout 100 $without_aslr "$work/selftest-$1" "$2"; }
clean_under_seeds() {
    local seed
    for seed in 1 2 3; do CUDA_EMULATOR_SEED=$seed selftest "$1" good || { echo "seed $seed"; return 1; }; done
}
wrong_number() {
    ! selftest plain "$1" > "$work/said" && cat "$work/said" && grep -q "runtime_selftest: .* was expected" "$work/said"
}
wrong_under_seeds() {
    local seed
    for seed in 1 2 3; do CUDA_EMULATOR_SEED=$seed wrong_number "$1" || return 1; done
}
wrong_under_some_seeds() { # and right under others: the order is random
    local seed wrong=0
    for seed in $(seq 40); do CUDA_EMULATOR_SEED=$seed wrong_number "$1" && wrong=$((wrong + 1)); done
    echo "wrong under $wrong of 40 seeds"
    [ $wrong -gt 0 ] && [ $wrong -lt 40 ]
}
reported() { # BUILD NAME PATTERN: status 1, and one message, with the line marked as the bug
    local status line
    line=$(grep -n "// BUG $2\$" $source | cut -d: -f1)
    selftest "$1" "$2" > "$work/said" 2>&1
    status=$?
    grep "^cuda emulator: " "$work/said" || head -n 20 "$work/said"
    [ $status -eq 1 ] && [ "$(grep -c "^cuda emulator: " "$work/said")" -eq 1 ] &&
        grep "^cuda emulator: .*$3" "$work/said" | grep -q "$source:$line: "
}

for build in plain asan tsan; do
    check "$build: it compiles" sh dev/emulator/compile.sh $source "$work/selftest-$build" $build ${with:-}
    check "$build: correct twins are clean and calls behave as in CUDA, under several seeds" clean_under_seeds $build
done
[ -n "${with:-}" ] || skip "cuBLASLt's calls" "its header is not here"
for mistake in missing_wait event_too_early legacy_stream reused_early read_early not_written \
    not_launched old_argument graph_not_waited_for; do
    check "$mistake is a wrong number" wrong_under_seeds $mistake
done
check "overwritten is a wrong number under some seeds" wrong_under_some_seeds overwritten
for build in plain asan tsan; do
    check "$build: a number that the host reads on the device" \
        reported $build host_reads "host code touched device memory at .*byte 12 of an allocation of 4000 bytes"
    check "$build: device memory as an argument of memcpy" reported $build host_copies "host code touched device memory"
    check "$build: host memory as an argument of a kernel" reported $build host_pointer "argument 2, .*, is ordinary host memory"
    check "$build: freed memory as an argument" \
        reported $build freed "byte 0 of an allocation of 4000 bytes of device memory that was freed"
done
check "plain: freed memory in a structure" \
    reported plain freed_in_structure "fill_hidden, block .*Segmentation fault at .* that was freed"
check "asan: freed memory in a structure" reported asan freed_in_structure "fill_hidden, block .*use-after-poison"
calls_from_callback() {
    ! selftest plain call_from_callback 2> "$work/said" &&
        grep -q "cudaDeviceSynchronize is called by a host function" "$work/said"
}
check "a call of CUDA's from a host function" calls_from_callback
done_testing
