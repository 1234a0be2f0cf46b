#!/bin/sh
# Runs every test that `make test` has built, under prove. Arguments go to prove (-v shows each check).
# C tests run in every build that has them, shell tests on the plain and on the sanitized programs.
set -eu
cd "$(dirname "$0")/.."
command -v prove >/dev/null || { echo "prove is missing (package perl): sh dev/setup.sh installs it" >&2; exit 1; }

wrappers=build/t
rm -rf "$wrappers"
mkdir -p "$wrappers"
for build in build build/debug; do
    for script in test/*.t; do
        [ $build = build ] || grep -q BUILD "$script" || continue # it tests no program of ours
        wrapper="$wrappers/$(echo "$build" | tr / -)-$(basename "$script")"
        printf '#!/bin/sh\nBUILD=%s exec bash %s\n' "$build" "$script" > "$wrapper"
        chmod +x "$wrapper"
    done
done

# The race detector does not see how OpenMP's own threads wait for one another; ours are the ones to be looked at. Before a
# process ends it waits for races with threads that still run: longer than a heartbeat, and not a second in each of hundreds.
for program in build/tsan/test/test_*; do
    [ -x "$program" ] || continue
    wrapper="$wrappers/tsan-$(basename "$program").t"
    printf '#!/bin/sh\nTSAN_OPTIONS="atexit_sleep_ms=300 ${TSAN_OPTIONS-}" OMP_NUM_THREADS=1 exec %s\n' "$program" > "$wrapper"
    chmod +x "$wrapper"
done

export CMOCKA_MESSAGE_OUTPUT=TAP
unset TEST_ONLY # lib.sh would leave checks out
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
needs_gpu='build/cuda*'
if nvidia-smi -L >/dev/null 2>&1; then needs_gpu=none; fi
tests=$(find build -maxdepth 3 \( -path build/venv -o -path build/tsan -o -path "$needs_gpu" \) -prune -o -path '*/test/test_*' -type f -perm -u+x -print | sort)
# The longest ones first, by part of their names, so that both jobs end together.
long="emulated_run cuda_kernels build-variants exercises build-mutations emulated_ddp emulated_zero zero fsdp debug-ddp_together
    tsan-test_control cuda_attention emulator_runtime build-emulator.t build-setup debug-ddp.t build-comm.t
    test/test_control cudnn_plans build-scaling"
all=$(ls $tests "$wrappers"/*.t)
ordered=$({ for part in $long; do echo "$all" | grep -F -e "$part" || true; done; echo "$all"; } | awk '!seen[$0]++')
# Two at a time: many of them wait more than they compute, for deadlines and for one another's ranks.
exec prove --exec '' --timer --jobs "${JOBS:-2}" "$@" $ordered
