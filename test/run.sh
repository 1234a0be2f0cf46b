#!/bin/sh
# run.sh [quick|rest] [OPTION OF PROVE...] - runs the tests that make test-programs (quick) or make test-all-programs (rest) built.
#
# quick   what `make test` runs: C tests in the plain build in three precisions, the shell tests of the CPU programs, sanitized runs of
#         single, ddp and fsdp, and each kernel of llmc/device/cuda/ once under the emulator
# rest    what `make test-all` adds: all tests with sanitizers, threads under ThreadSanitizer, the emulator's tests, tests of
#         dev/'s benchmarks, mutations and exercises, fuzzing, and further numbers of ranks and shapes in the shell tests
# Without a tier it runs both. JOBS=N runs N tests at a time (3).
set -eu
cd "$(dirname "$0")/.."
command -v prove >/dev/null || { echo "error: prove is missing (package perl); sh dev/setup.sh installs it" >&2; exit 1; }
tiers="quick rest"
case ${1-} in quick|rest) tiers=$1; shift ;; esac

# Shell tests that `make test` leaves out: they test kernels that need an emulator, or tools that no training run needs.
only_rest="3d_checkpoints bench bench_gpu comm_bench compress_loss cpu_variants cublaslt_descriptors cuda_attention cuda_build cuda_kernels cudnn_plans emulated_ddp
    emulated_3d emulated_compress emulated_fsdp emulated_pp emulated_run emulated_tp emulated_zero emulator emulator_runtime exercises fuzz gpu_check labs local_sgd mutations plan_own pp_bubble roofline site split variants"
is_only_rest() { case " $(echo $only_rest) " in *" $1 "*) ;; *) return 1 ;; esac; }

wrappers=build/t
rm -rf "$wrappers"
mkdir -p "$wrappers"
# wrap NAME COMMAND: a test for prove
wrap() { printf '#!/bin/sh\n%s\n' "$2" >"$wrappers/$1"; chmod +x "$wrappers/$1"; }
# prove keeps to itself what a test says, so its checks are also kept in $wrappers/said/TEST.
mkdir "$wrappers/said"
cat >"$wrappers/keep" <<'END'
#!/bin/bash
"$@" | tee "${0%/keep}/said/$(echo "$1" | tr / -)"
exit "${PIPESTATUS[0]}"
END
chmod +x "$wrappers/keep"
# failed_checks: each check that failed, under the name of its test, with its first diagnostics.
failed_checks() {
    (cd "$wrappers/said" && awk '/^not ok/ && !/# TODO/ { if (FILENAME != file) print FILENAME ":"; file = FILENAME; left = 13; print "  " $0; next }
        /^#/ && left-- > 1 { print "  " $0; next } { left = 0 }' $(ls) /dev/null)
}
c_tests() { find "$@" -path '*/test/test_*' -type f -perm -u+x 2>/dev/null; }
plain="build/test build/bf16/test build/fp16/test"
sanitized="build/debug/test build/bf16-debug/test build/fp16-debug/test"
if nvidia-smi -L >/dev/null 2>&1; then plain="$plain build/cuda/test build/cuda-bf16/test build/cuda-fp16/test"; fi

tests=
for tier in $tiers; do
    for script in test/*/*.t; do
        name=$(basename "$script" .t)
        run="TIER=$tier exec bash $script"
        if [ $tier = quick ]; then
            is_only_rest "$name" || wrap "quick-$name.t" "BUILD=build $run"
            continue
        fi
        # In the plain build only what the quick tier left out; in the sanitized build all, if it tests a program of ours.
        if is_only_rest "$name"; then wrap "rest-$name.t" "BUILD=build exec bash $script" # it has no tiers inside
        elif grep -q 'for_tier rest' "$script"; then wrap "rest-$name.t" "BUILD=build $run"; fi
        if grep -q BUILD "$script" && [ "$name" != sanitized ]; then wrap "debug-$name.t" "BUILD=build/debug exec bash $script"; fi
    done
    if [ $tier = quick ]; then
        tests="$tests $(c_tests $plain)"
        # Matrix products take other ways on processors without AVX-512.
        for program in build/test/test_layers build/bf16/test/test_layers; do
            wrap "avx2-$(echo "$program" | tr / -).t" "ONEDNN_MAX_CPU_ISA=AVX2 exec $program"
        done
        continue
    fi
    tests="$tests $(c_tests $sanitized)"
    # ThreadSanitizer does not see how OpenMP's own threads wait for one another, so there is one; our threads are to be looked at.
    # Before a process ends it waits for races with threads that still run: longer than a heartbeat, less than the default second.
    for program in build/tsan/test/test_*; do
        [ -x "$program" ] || continue
        wrap "tsan-$(basename "$program").t" "TSAN_OPTIONS=\"atexit_sleep_ms=300 \${TSAN_OPTIONS-}\" OMP_NUM_THREADS=1 exec $program"
    done
done

export CMOCKA_MESSAGE_OUTPUT=TAP
unset TEST_ONLY TIER # lib.sh would leave checks out
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
# The longest ones first, by part of their names, so that all jobs end together.
long="rest-cuda_kernels rest-site rest-labs rest-emulated_run rest-variants rest-exercises rest-mutations rest-emulated debug-zero_checkpoints
    debug-test_checkpoint debug/test/test_layers rest-zero debug-zero rest-fsdp debug-fsdp rest-tp debug-tp rest-pp debug-pp rest-3d debug-3d rest-compress debug-compress debug-recompute
    tsan-test_control debug-plan rest-emulator debug-comm_bench quick-zero quick-fsdp quick-tp quick-pp quick-3d quick-emulated quick-comm quick-one_writer test/test_control
    quick-setup quick-ddp quick-sanitized quick-demo quick-scaling test/test_control"
all=$(for test in $tests "$wrappers"/*.t; do echo "$test"; done | sort)
ordered=$({ for part in $long; do echo "$all" | grep -F -e "$part" || true; done; echo "$all"; } | awk 'NF && !seen[$0]++')

# Three at a time, even on two cores: many of them wait more than they compute, for deadlines and for other ranks.
status=0
{ prove --exec "$wrappers/keep" --timer --jobs "${JOBS:-3}" "$@" $ordered || echo failed >"$wrappers/failed"; } | tee "$wrappers/log"
[ ! -e "$wrappers/failed" ] || status=1
checks=$(sed -n 's/^Files=[0-9]*, Tests=\([0-9]*\),.*/\1/p' "$wrappers/log")
command="make test"
[ "$tiers" = quick ] || command="make test-all"
if [ $status != 0 ]; then
    failed_checks
    echo "$command: some of ${checks:-the} checks failed, see above; sh test/run.sh ${tiers##* } -v shows each check"
    exit $status
fi
# Tests that say "same in every build" were left out on purpose; others lack something here.
lacking=$(grep 'skipped:' "$wrappers/log" | grep -vc 'same in every build' || true)
[ "$lacking" = 0 ] || echo "$lacking test file(s) were skipped because something is missing here (see above; make doctor tells what)."
quick="layers and 20-step runs of every stage agree with PyTorch, stages with each other to the bit, bytes are as predicted, bad input and dead ranks lose nothing"
rest="no sanitizer found anything, emulated kernels and runs agree with the CPU's, mistakes made on purpose are noticed"
case $tiers in
    quick) echo "All $checks checks passed: $quick. make test-all adds sanitizers throughout, thread races, all emulated kernels in three builds, mutations, fuzzing, interop." ;;
    rest) echo "All $checks checks passed: $rest." ;;
    *) echo "All $checks checks passed: $quick; $rest." ;;
esac
