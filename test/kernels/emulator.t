#!/bin/bash
# The CUDA emulator finds what it claims to find: every deliberate bug in dev/emulator/selftest.cu and every flaw in
# hopper_selftest.cu is reported, with kernel and line, by the build meant for it. The correct twins are clean in all builds under
# several seeds.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
sh dev/emulator/find_headers.sh > /dev/null 2>&1 || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
source=dev/emulator/selftest.cu
hopper=dev/emulator/hopper_selftest.cu
without_aslr=
setarch -R true 2> /dev/null && without_aslr="setarch -R" # ThreadSanitizer cannot start in some address layouts

selftest() { $without_aslr "$work/${3:-selftest}-$1" "$2"; }
# reported BUILD KERNEL PATTERN: status 1, and one message with the kernel, the line marked as its bug, and the pattern.
reported() {
    local build=$1 kernel=$2 pattern=$3 status line expected
    line=$(grep -n "// BUG $kernel\$" $source | cut -d: -f1)
    CUDA_EMULATOR_STEPS=3000000 selftest "$build" "$kernel" > "$work/said" 2>&1
    status=$?
    grep "^cuda emulator: " "$work/said" || head -n 20 "$work/said"
    [ "$status" -eq 1 ] || { echo "status $status, 1 was expected"; return 1; }
    [ "$(grep -c "^cuda emulator: " "$work/said")" -eq 1 ] || { echo "one message was expected"; return 1; }
    grep "^cuda emulator: $kernel<bug>, block (.*), thread (.*), $source:[0-9]*: .*$pattern" "$work/said" |
        grep -q "$source:$line[: ]" || { echo "'$pattern' in line $line was expected"; return 1; }
}
# The same for flaws of hopper_selftest.cu. BUG is the name that the line is marked with, if it is not the flaw's.
hopper() { # FLAW PATTERN [BUG] [BUILD]
    local lines
    lines=$(grep -n "// BUG.* ${3:-$1}\( \|\$\)" $hopper | cut -d: -f1 | paste -sd '|')
    selftest "${4:-plain}" "$1" hopper > "$work/said" 2>&1
    [ $? -eq 1 ] || { echo "status 1 was expected"; return 1; }
    grep "^cuda emulator: " "$work/said"
    grep -Eq "^cuda emulator: [a-z]+<flaw(, T, tb)?>, block \(0,0,0\), thread .*, $hopper:($lines): .*$2" "$work/said" ||
        { echo "'$2' in line $lines was expected"; return 1; }
}
hopper_wrong_number() {
    ! selftest plain "$1" hopper > "$work/said" && cat "$work/said" && grep -q "hopper_selftest: $1: .* was expected" "$work/said"
}
refused() { # KERNEL PATTERN: the launch itself is refused
    selftest plain "$1" > "$work/said" 2>&1 && return 1
    cat "$work/said"
    grep -q "^cuda emulator: .*selftest.cu:$(grep -n "// BUG $1\$" $source | cut -d: -f1): .*$2" "$work/said"
}
wrong_number() { ! selftest plain "$1" > "$work/said" && cat "$work/said" && grep -q "selftest: $1: .* was expected" "$work/said"; }
clean_under_seeds() {
    local seed
    for seed in 1 2 3; do
        CUDA_EMULATOR_SEED=$seed selftest "$1" good "${2:-selftest}" || { echo "seed $seed"; return 1; }
    done
    CUDA_EMULATOR_WORKERS=1 selftest "$1" good "${2:-selftest}" || { echo "one worker"; return 1; }
}
bad_setting() {
    ! CUDA_EMULATOR_SEED=x selftest plain good 2> "$work/said" && grep -q "CUDA_EMULATOR_SEED must be a number, not 'x'" "$work/said"
}
compiler_names_the_line() {
    printf '__global__ void k() {\n    __shared__ int a[2];\n    a[0] = wrong;\n}\n' > "$work/error.cu"
    ! sh dev/emulator/compile.sh "$work/error.cu" "$work/error" 2> "$work/said" && cat "$work/said" && grep -q "error.cu:3:.*wrong" "$work/said"
}

for build in plain asan tsan; do
    check "$build: it compiles" sh dev/emulator/compile.sh $source "$work/selftest-$build" $build
    check "$build: correct kernels are clean under several seeds" clean_under_seeds $build
    check "$build: the kernels of capability 9.0 compile" sh dev/emulator/compile.sh $hopper "$work/hopper-$build" $build
    check "$build: without a flaw they are clean, for operands of all layouts" clean_under_seeds $build hopper
done
check "asan: a row guard that is off by one" reported asan guard heap-buffer-overflow
check "asan: reading past static shared memory" reported asan past_static_shared use-after-poison
check "asan: reading past dynamic shared memory" reported asan past_dynamic_shared use-after-poison
check "48 KB of dynamic shared memory beside static memory, without asking for it" reported plain static_beside_dynamic \
    "128 bytes of static and 49152 of dynamic shared memory; a block may have 49152"
check "all that a block can have as dynamic memory, beside static memory" reported plain static_beside_all \
    "128 bytes of static and 166912 of dynamic shared memory; a block may have 166912"
for build in plain asan tsan; do
    check "$build: an index past a shared array" reported $build past_array "out of bounds"
    check "$build: a vector load from a misaligned address" reported $build misaligned "isaligned address"
    check "$build: a vector load with a cache hint, misaligned" reported $build misaligned_hint "isaligned address"
    check "$build: a null pointer" reported $build null_pointer "Segmentation fault"
    check "$build: an index that overflows" reported $build overflow "Signed integer overflow"
    check "$build: threads at different barriers" reported $build divergent_barrier "waits at another barrier"
    check "$build: a barrier after some threads have left" reported $build barrier_after_exit "can never open"
    check "$build: a mask that names lanes which never arrive" reported $build wrong_mask "can never go on: it waits for lane"
    check "$build: a shuffle from a lane that takes no part" reported $build absent_lane "reads lane 16, which takes no part"
    check "$build: an endless loop" reported $build endless "endless loop"
done
check "tsan: a missing barrier" reported tsan missing_barrier "data race"
check "tsan: a missing __syncwarp" reported tsan missing_syncwarp "data race"
check "tsan: a shuffle in place of a barrier" reported tsan shuffle_for_barrier "data race"
check "tsan: shared memory written while others read it" reported tsan reused_early "data race"
check "tsan: blocks that add without an atomic" reported tsan plain_add "data race"
check "tsan: a loop that forgot the block's stride" reported tsan stride_forgotten "data race"
check "tsan: results read from other blocks without a fence" reported tsan missing_fence "data race"
check "plain: an asynchronous copy that was not waited for is a wrong number" wrong_number unwaited_copy
check "an mbarrier that was not initialised" hopper unmade_barrier "there is no mbarrier here"
check "an mbarrier without the fence for the copy engine" hopper unfenced_barrier "the copy engine does not know this mbarrier"
check "one arrival too many" hopper early_arrival "one arrival more than the 1"
check "an mbarrier that expects less than is copied" hopper little_expected \
    "(before this tile arrived|-[0-9]+ bytes|memory .* has changed)"
check "an mbarrier that expects more than is copied" hopper much_expected "can never go on: it still expects 0 of 1 arrivals and 8192 bytes"
check "a wait for the wrong parity" hopper wrong_parity "one arrival more than the 1"
check "a barrier of threads in place of one of bytes" hopper unwaited_tile "one arrival more than the 1"
check "a tile that no thread waits for" hopper tile_for_nobody "the block has ended before this tile arrived"
check "a swizzled tile that does not begin where its pattern does" hopper misplaced_tile "begins within the pattern of 8 rows" wgmma
check "sums without a fence before them" hopper unfenced_sums "without a wgmma_fence" wgmma
check "sums that are never waited for" hopper unwaited_sums "ended without waiting for this wgmma" wgmma
check "sums that are read before the wait are a wrong number" hopper_wrong_number early_sums
check "sums that are written before the wait" hopper touched_sums "sums of a wgmma that was not waited for have been written"
check "a tile that is filled again before the wait" hopper refilled_early "memory .* has changed" wgmma
check "a warpgroup with an exited thread" hopper part_of_warpgroup "needs the whole warpgroup; thread 127 .* has exited" wgmma
check "a warp with other operands than the rest of its warpgroup" hopper other_operands "other operands than thread .0,0,0. of the same" wgmma
check "a descriptor that reaches out of shared memory" hopper beyond_shared "reaches out of the block's shared memory" wgmma
check "a descriptor with bits set that must be 0" hopper bad_descriptor "has bits set that must be 0" wgmma
check "tsan: a tile that is filled again while others read it" hopper unasked_refill "data race" "" tsan
check "tsan: a tile that is read without a wait" hopper unwaited_read "data race" "" tsan
check "a fragment of A that was not settled" hopper unsettled_fragment "a fragment without wgmma_settle"
check "a fragment that was settled after the fence" hopper unfenced_fragment "without a wgmma_fence since wgmma_settle"
check "a fragment that is written after the fence" hopper late_fragment "has been written since wgmma_settle"
check "a fragment that is written before the wait" hopper touched_fragment "has been written before it was waited for"
check "a copy with another number of dimensions than its map" hopper other_rank "a copy of rank 2 by a tensor map of rank 3"
for flaw in read_fragment swapped_fragment other_plane; do check "$flaw is a wrong number" hopper_wrong_number $flaw; done
check "another swizzle than the tile's is a wrong number" hopper_wrong_number wrong_swizzle
check "another stride than the tile's is a wrong number" hopper_wrong_number wrong_stride
check "a block that is too large is refused" refused large_block "at most 1024 threads"
check "an empty grid is refused" refused empty_grid "grid (0,1,1)"
check "more shared memory than was allowed is refused" refused too_much_shared "50000 bytes of dynamic shared memory"
check "  also more than a kernel was set to, however little" refused more_than_set "1004 bytes of dynamic shared memory; it may have 1000"
check "a setting that is not a number is refused" bad_setting
check "the compiler's messages name the kernel's own line" compiler_names_the_line
# ---- programs of others ----
# The folder alone, and the example of its README: the race is reported at its line.
works_alone() {
    cp -r dev/emulator "$work/alone" &&
        perl -ne 'if (/^    #include <cstdio>/ .. /^Threads run/) { print if s/^    // || /^$/ }' dev/emulator/README.md > "$work/sums.cu"
    (cd "$work" && sh alone/compile.sh sums.cu sums tsan -w &&
        EMULATOR_LIBRARIES="cublaslt cudnn nccl" CPPFLAGS=$headers sh alone/compile.sh sums.cu all plain -w &&
        ! $without_aslr ./sums > said 2>&1 && grep '^cuda emulator: block_sum, block (.*), thread (.*), sums.cu:13: data race' said)
}
refuses_source() { # PATTERN SOURCE: to compile it, to start it or to run it
    echo "$2" > "$work/others.cu"
    ! { sh dev/emulator/compile.sh "$work/others.cu" "$work/others" plain -w && timeout 20 "$work/others"; } \
        > "$work/said" 2>&1 || return 1
    cat "$work/said"
    grep -q "others.cu:1: $1\|error: .*$1" "$work/said"
}
launch='int main() { k<<<1, 32>>>(); return cudaDeviceSynchronize(); }'
if headers=$(sh dev/find_cuda.sh compile cublasLt cudnn nccl 2> /dev/null); then
    check "a copy of the folder works alone, and finds the race of its README's example" works_alone
else
    skip "a copy of the folder works alone" "cuBLAS, cuDNN or NCCL is not here"
fi
check "shared memory outside of functions is refused by name" refuses_source "__shared__ variables must be declared inside" \
    "extern __shared__ float s[]; __global__ void k() { s[0] = 1; } $launch"
check "a launch from a kernel is refused, also without arguments" refuses_source "a launch of inner from device code" \
    "__global__ void inner() {} __global__ void k() { inner<<<1, 1>>>(); } $launch"
check "mma.h is refused, because it would compute nothing" refuses_source "nvcuda::wmma has no stand-in" "#include <mma.h>
$launch"
done_testing
