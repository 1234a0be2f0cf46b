#!/bin/bash
# dev/doctor.sh tells what works from what does not: here everything required works, so the tests break it on purpose.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
export NVCC=no-such-nvcc # it takes seconds and decides nothing
mkdir "$work/include" "$work/lib"
echo '#error broken on purpose' > "$work/include/jansson.h"
echo 'not a library' > "$work/lib/libdnnl.so"

# doctor STATUS [VARIABLE=VALUE...]: what it says goes to $work/said.
doctor() {
    local expected=$1 status
    shift
    env "$@" sh dev/doctor.sh > "$work/said" 2>&1 < /dev/null
    status=$?
    cat "$work/said"
    [ "$status" -eq "$expected" ]
}
says() { grep -qe "$1" "$work/said" || { echo "it did not say '$1'"; return 1; }; }

a_whole_machine_is_well() { doctor 0 && says 'ok *oneDNN *[0-9]' && says 'can be built and run here' && not says 'MISSING'; }
a_broken_header_is_told() {
    doctor 1 CPATH="$work/include" && says 'MISSING *Jansson .*broken on purpose' && says 'get: .*libjansson-dev' &&
        says 'need what is missing: Jansson\.'
}
a_broken_library_is_told() { doctor 1 LDFLAGS="-L$work/lib" && says 'MISSING *oneDNN *.*libdnnl.so' && says 'for: matrix products'; }
no_compiler_is_told() { doctor 1 CC=no-such-cc && says 'MISSING *C compiler *no no-such-cc'; }
optional_things_are_optional() { doctor 0 CLANG=no-such-clang && says 'missing *fuzzer *no no-such-clang' && says 'for: make fuzz'; }
a_gpus_libraries_are_no_failure() { doctor 0 && says 'missing *cuBLASLt *no no-such-nvcc' && says 'get: sh dev/setup.sh; or pip install nvidia-cudnn-cu13'; }
threads_are_counted() { doctor 0 OMP_NUM_THREADS=3 && says 'a run uses 3 threads'; }

check "where everything required is here, it says so and succeeds" a_whole_machine_is_well
check "a header that does not compile is reported with what it is for and how to get it" a_broken_header_is_told
check "a library that does not link is reported" a_broken_library_is_told
check "no compiler is reported" no_compiler_is_told
check "a missing optional tool is reported and is no failure" optional_things_are_optional
check "a GPU's libraries that are missing are reported with how to get them, and are no failure" a_gpus_libraries_are_no_failure
check "the threads are those that a run will use" threads_are_counted
done_testing
