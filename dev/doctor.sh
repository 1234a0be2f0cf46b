#!/bin/sh
# doctor.sh - what this machine has for training: cores and memory, each library and tool by version, MPI and GPU; and for
# what is missing, what it is needed for and how to get it. Everything is tried, nothing is asked of a package manager.
#
#   make doctor
#
# Exit status: 0 if the CPU programs and their tests can be built and run here, 1 if not.
set -u
here=$(dirname -- "$0")
probes=$here/doctor
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
. "$probes/probes.sh"

row() { printf '  %-8s %-14s %s\n' "$1" "$2" "$3"; }

processor() {
    model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)
    echo "${model:-$(uname -m)}$(vector_instructions)"
}
# What the compiler uses under -march=native, as far as it decides speed.
vector_instructions() {
    ${CC:-cc} -march=native -dM -E - </dev/null 2>/dev/null | awk '
        BEGIN { split("AVX2 AVX512F AVX512_BF16 AVX512BF16 AMX_BF16 ARM_NEON ARM_FEATURE_SVE ARM_FEATURE_BF16", known, " ") }
        { seen[$2] = 1 }
        END { for (i = 1; i in known; i++) if (("__" known[i] "__") in seen) printf ", %s", known[i] }'
}

gigabytes() { awk -v bytes="$1" 'BEGIN { printf "%.1f GB", bytes / 1e9 }'; }
meminfo() { awk -v key="$1:" '$1 == key { printf "%.0f", $2 * 1024 }' /proc/meminfo 2>/dev/null; }
memory() {
    total=$(meminfo MemTotal) free=$(meminfo MemAvailable)
    if [ -z "$total" ]; then echo "not known: there is no /proc/meminfo"; return; fi
    limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
    echo "$(gigabytes "$total"), of which $(gigabytes "$free") are free$([ "$limit" = max ] || echo "; this container may use $(gigabytes "$limit")")"
}
# A container's share of the cores, which programs do not see: they start a thread a core and wait for each other.
core_quota() {
    read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max || return
    [ "$quota" = max ] || awk -v q="$quota" -v p="$period" 'BEGIN { printf "; this container may use %.1f of them: set OMP_NUM_THREADS=%d", q/p, (q/p < 1 ? 1 : q/p) }'
}

# report CLASS...: a row for every component of these classes; sets required_missing to the names of those that must be here.
report() {
    for class in "$@"; do components | grep -F "|$class|"; done >"$scratch/wanted"
    while IFS='|' read -r key name class purpose how rest; do
        if found=$("probe_$key" 2>/dev/null </dev/null); then
            echo "$found" | while read -r line; do row ok "$name" "$line"; done
            continue
        fi
        if [ "$class" = required ]; then row MISSING "$name" "$found"; required_missing="${required_missing:+$required_missing, }$name"
        else row missing "$name" "$found"; fi
        row "" "" "for: $purpose"
        if [ "$class" = extra ]; then row "" "" "get: $how"; else row "" "" "get: sh dev/setup.sh, or the packages $how"; fi
    done <"$scratch/wanted"
}

required_missing=
echo "This machine"
row "" processor "$(processor)"
row "" cores "$(run_c machine.c -fopenmp)$(core_quota)"
row "" memory "$(memory)"
echo "To build and test for the CPU"
report required optional
echo "For several ranks, and for GPUs"
report extra
if [ -n "$required_missing" ]; then
    echo "The CPU programs and their tests need what is missing: $required_missing."
    exit 1
fi
echo "The CPU programs and their tests can be built and run here."
