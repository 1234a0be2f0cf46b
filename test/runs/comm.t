#!/bin/bash
# Collectives on 1 to 8 ranks, in normal and strict mode: test_comm checks the results on every rank. Then mistakes in their use.
. test/lib.sh
test_comm=$BUILD/test/test_comm

passes() { # RANKS STRICT: every claim holds, and no sanitizer reports anything
    SHARD_COMM_STRICT=$2 on_ranks "$1" "$test_comm" > "$work/said" 2>&1 && grep -qx '1\.\.[0-9]*' "$work/said" &&
        ! grep -q 'runtime error:\|ERROR: ' "$work/said" || { cat "$work/said"; return 1; }
}
no_races() {
    local without_aslr=
    setarch -R true 2> /dev/null && without_aslr="setarch -R" # ThreadSanitizer cannot start in some address layouts
    TSAN_OPTIONS=suppressions=test/mpi_races.txt:print_suppressions=0 on_ranks 2 $without_aslr build/tsan/test/test_comm
}
[ "$BUILD" = build ] && all="1 2 3 4" || all="1 3"
for ranks in $all; do
    check "every claim of test_comm holds on $ranks ranks" passes $ranks 0
    case $ranks in 1|3) for_tier quick ;; *) for_tier rest ;; esac
    check "  on $ranks also in strict mode" passes $ranks 1
    for_tier quick
done
if [ "$BUILD" = build ]; then
    for_tier rest
    check "every claim of test_comm holds on 8 ranks" passes 8 0
    check "ThreadSanitizer sees no race between the threads of 2 ranks" no_races
    for_tier quick
fi

mistake() { # NAME PATTERN...: on one rank
    local name=$1
    shift
    fails_with "$@" -- "$test_comm" die "$name"
}
mistake_on() { # RANKS STRICT NAME PATTERN...
    local ranks=$1 strict=$2 name=$3 patience
    shift 3
    for patience in 3 12; do # a rank on a busy machine may be late without a mistake
        ! SHARD_COMM_STRICT=$strict fails_with "$@" -- on_ranks "$ranks" "$test_comm" --comm-timeout $patience die "$name" || return 0
    done
    return 1
}
check "a second wait for the same operation is an error" mistake wait-twice "operation #0 is waited for a second time"
check "a wait for an operation that was never issued is an error" mistake wait-unknown "operation #0, but only 0 were issued"
check "an operation that was never waited for is an error at the end" \
    mistake never-waited "all-reduce, operation #0, was never waited for"
check "  and when too many are in flight" mistake too-many "1024 operations are under way"
check "a rank cannot send to itself" mistake send-to-itself "send of rank 0 cannot name rank 0 of 1"
check "messages need comm_connect" mistake send-unconnected "part.0: call comm_connect before the first send"
check "  and only one call of it" mistake connect-twice "world: comm_connect was called twice"
check "a root must exist" mistake no-such-root "broadcast of rank 0 cannot name rank 1 of 1"
check "bytes cannot be added" mistake sum-of-bytes "reduce-scatter of bytes"
overlaps=" buffers of an all-to-all of 3 x 1 fp32 overlap"
check "an all-to-all cannot be in place" mistake overlap "the two buffers of an all-to-all of 1 x 1 fp32 overlap"
check "  nor may its output begin within its input" mistake_on 3 0 overlap-before "$overlaps"
check "  or its input within its output" mistake_on 3 0 overlap "$overlaps"
check "a split needs all operations to be done" mistake split-in-flight "wait for the operations under way first"
check "a communicator's name can be used only once" mistake split-twice "there is a communicator 'part.0' already"
check "the world is freed last" mistake world-first "comm_free of the world before 'part.0'"
check "errors name their rank" \
    mistake_on 2 0 wait-twice "^rank 1: error: world: operation #0 is waited for a second time"
check "a name can be used only once, also on several ranks" \
    mistake_on 2 0 split-twice "there is a communicator 'part.0' already"
check "strict mode sees ranks that wait in different orders" \
    mistake_on 3 1 orders-differ "has reached all-reduce #[01] of world (2 fp32"
check "  and ranks whose operations differ in size" mistake_on 2 1 sizes-differ "has reached all-reduce #0 of world ([23] fp32"
check "a message that is longer than its receiver expects is an error" mistake_on 2 0 message-too-long "receive failed"
check "a rank that does not come is named" mistake_on 3 0 hang "rank 2 has not reached all-reduce #1"
check "--deterministic and --allreduce ring exclude each other" \
    fails_with "leave one of them out" -- "$test_comm" --deterministic --allreduce ring
check "--comm nccl needs a program with NCCL" fails_with "built without NCCL.*use --comm mpi" -- "$test_comm" --comm nccl
check "SHARD_COMM_STRICT is 0 or 1" fails_with "must be 0 or 1, not 'yes'" -- env SHARD_COMM_STRICT=yes "$test_comm"
check "ranks that MPI did not start are an error" fails_with "rank 0 of 2, but MPI says rank 0 of 1" -- \
    env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 "$test_comm"

# ---- a program without MPI ----
if [ "$BUILD" = build ]; then
    without=$work/without_mpi
    compile() { # without the flags of mpicc
        ${CC:-cc} -std=c11 -O1 -fopenmp -ffp-contract=off -Wall -Wextra -Werror test/unit/test_comm.c -o "$without" \
            -lpthread -lm && ! ldd "$without" | grep libmpi
    }
    alone() {
        SHARD_COMM_STRICT=$1 "$without" > "$work/said" 2>&1 && grep -qx '1\.\.[0-9]*' "$work/said" ||
            { cat "$work/said"; return 1; }
    }
    check "test_comm compiles without MPI" compile
    check "  every claim holds on one rank" alone 0
    check "  also in strict mode" alone 1
    check "  and several ranks are an error" \
        fails_with "there are 2 ranks, and this program was built without MPI: start it alone" -- on_ranks 2 "$without"
fi
done_testing
