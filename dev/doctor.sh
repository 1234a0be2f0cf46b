#!/bin/sh
# doctor.sh - what this machine has for training: cores, memory and disk, each library and tool by version, MPI and GPU; what
# a missing component is needed for and how to get it; and whether make demo and make test will work here. Everything is
# tried; no package manager is asked.
#
#   make doctor
#
# Exit status: 0 if make demo and make test work here, 1 if not.
set -u
here=$(dirname -- "$0")
probes=$here/doctor
. "$probes/probes.sh"
make_scratch

row() { printf '  %-8s %-14s %s\n' "$1" "$2" "$3"; }

processor() {
    model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)
    echo "${model:-$(uname -m)}$(vector_instructions)"
}
# The vector instructions that the compiler uses with -march=native, as far as they matter for speed.
vector_instructions() {
    ${CC:-cc} -march=native -dM -E - </dev/null 2>/dev/null | awk '
        BEGIN { split("AVX2 AVX512F AVX512_BF16 AVX512BF16 AMX_BF16 ARM_NEON ARM_FEATURE_SVE ARM_FEATURE_BF16", known, " ") }
        { seen[$2] = 1 }
        END { for (i = 1; i in known; i++) if (("__" known[i] "__") in seen) printf ", %s", known[i] }'
}

# PROC and CGROUP are for tests.
meminfo() { awk -v key="$1:" '$1 == key { printf "%.0f", $2 * 1024 }' "${PROC:-/proc}/meminfo" 2>/dev/null; }
memory_limit() { # a container's, in bytes; nothing if there is none
    read -r limit 2>/dev/null <"${CGROUP:-/sys/fs/cgroup}/memory.max" && [ "$limit" != max ] && echo "$limit"
}
memory() {
    total=$(meminfo MemTotal) limit=$(memory_limit)
    if [ -z "$total" ]; then echo "not known: there is no /proc/meminfo"; return; fi
    limit=${limit:+ (this container may use $(gigabytes "$limit"))}
    echo "$(gigabytes "$total"), of which $(gigabytes "$(meminfo MemAvailable)") are free$limit"
}
# What a program may use, in bytes: the smaller of what is free and the container's limit. Nothing where it is not known.
memory_to_use() {
    { meminfo MemAvailable && echo; memory_limit; } | awk 'NF && (!n++ || $1 < least) { least = $1 } END { if (n) print least }'
}
# A container's share of the cores. Programs do not see it: they start a thread per core, and these wait for each other.
core_quota() {
    read -r quota period 2>/dev/null <"${CGROUP:-/sys/fs/cgroup}/cpu.max" || return
    [ "$quota" = max ] || awk -v q="$quota" -v p="$period" 'BEGIN { printf "%.1f", q/p }'
}
cores_line() {
    quota=$(core_quota)
    echo "$cores${quota:+; this container may use $quota of them: set OMP_NUM_THREADS=$(whole "$quota")}"
}
whole() { awk -v n="$1" 'BEGIN { print n < 1 ? 1 : int(n) }'; }

# report CLASS...: a row for every component of these classes. Appends "CLASS KEY STATUS NAME" of what does not work to
# $scratch/lacking.
report() {
    for class in "$@"; do components | grep -F "|$class|"; done >"$scratch/wanted"
    while IFS='|' read -r key name class purpose how rest; do
        found=$("probe_$key" 2>/dev/null </dev/null)
        status=$?
        if [ $status = 0 ]; then
            echo "$found" | while read -r line; do row ok "$name" "$line"; done
            continue
        fi
        echo "$class $key $status $name" >>"$scratch/lacking"
        if [ $status = 2 ]; then row UNUSABLE "$name" "$found"
        elif is_required "$class"; then row MISSING "$name" "$found"
        else row missing "$name" "$found"; fi
        row "" "" "for: $purpose"
        if [ "$class" = extra ]; then row "" "" "get: $how"
        elif [ $status = 1 ]; then row "" "" "get: sh dev/setup.sh, or the packages $how"; fi
    done <"$scratch/wanted"
}

# ---- the README's two commands ----
lacks() { grep -q "^[a-z]* $1 " "$scratch/lacking"; } # KEY
names() { awk '{ $1 = $2 = $3 = ""; print }' | sed 's/^ *//' | paste -s -d ',' - | sed 's/,/, /g'; }

# The Makefile builds for the GPU where there is one.
builds_for_gpu() { has "${NVCC:-nvcc}" && nvidia-smi -L >/dev/null 2>&1; }

# Returns 0 if 4 processes can be started as make demo starts its ranks; otherwise prints why not.
starts_ranks() {
    fail() { echo "$*"; exit 1; }
    . "$here/on_ranks.sh"
    ranks_launcher 4
    # shellcheck disable=SC2086 # a command and its options
    said=$(attempt $launcher -np 4 true) || fail "$launcher does not start 4 ranks ($said); MPIRUN may name another launcher"
}

# what_lacks CLASSES COMMAND: which components of these classes (a pattern) and of the GPU build are lacking, in words.
what_lacks() {
    if lacks compiler; then grep ' compiler ' "$scratch/lacking" >"$scratch/those" # without it nothing else could be tried
    else grep -E "^($1) " "$scratch/lacking" >"$scratch/those"; fi
    missing=$(grep ' 1 ' "$scratch/those" | names) unusable=$(grep ' 2 ' "$scratch/those" | names)
    if [ -n "$missing" ]; then echo "$missing $(is_or_are "$missing") missing (sh dev/setup.sh)"; fi
    if [ -n "$unusable" ]; then echo "$unusable cannot be used, for the reason above"; fi
    if builds_for_gpu; then
        missing=$(grep -E ' (nvcc|cublaslt|cudnn|nccl) ' "$scratch/lacking" | names)
        if [ -n "$missing" ]; then
            echo "$missing $(is_or_are "$missing") missing for the GPU (see above; make GPU= $2 leaves the GPU out)"
        fi
    fi
}
is_or_are() { case $1 in *,*) echo are ;; *) echo is ;; esac; }

# verdict COMMAND CLASSES TIME DISK MEMORY: two rows; the time is on two cores, the others in GB.
verdict() {
    {
        what_lacks "$2" "$1"
        if [ "$1" = demo ] && ! lacks compiler && ! lacks mpi; then ( starts_ranks ); fi
        if [ -n "$not_writable" ]; then echo "$not_writable"
        elif less "$disk" "$4"; then echo "only $(gigabytes "$disk") are free in $clone, and it needs about $4 GB"; fi
    } >"$scratch/reasons"
    if [ -s "$scratch/reasons" ]; then
        works=no
        row NO "make $1" "does not work here: $(head -n 1 "$scratch/reasons")"
        sed 1d "$scratch/reasons" | while read -r line; do row "" "" "and $line"; done
    elif less "$memory" "$5"; then
        row "?" "make $1" "may not work here: $(gigabytes "$memory") of memory can be used, and it needs about $5 GB"
    else
        without=
        if [ "$1" = demo ] && lacks gnuplot; then without=", without its plot: gnuplot is missing (sh dev/setup.sh)"; fi
        row ok "make $1" "works here$without"
    fi
    row "" "" "takes $3 on two cores$count, $4 GB of disk and $5 GB of memory"
}
less() { [ -n "$1" ] && awk -v bytes="$1" -v gb="$2" 'BEGIN { exit !(bytes < gb * 1e9) }'; }
# How many cores this machine has, because the times are for two.
core_count() {
    n=$(core_quota)
    n=$(whole "${n:-${cores%% *}}")
    case ${cores%% *} in *[!0-9]*|'') return ;; esac
    if [ "$n" = 1 ]; then echo " (this machine has 1, so about twice that)"; else echo " (this machine has $n)"; fi
}

: >"$scratch/lacking"
works=yes
cores=$(run_c machine.c -fopenmp) || cores="$(getconf _NPROCESSORS_ONLN) cores"
clone=$(cd "$here/.." && pwd)
not_writable=$(clone_is_writable build data)
disk=$(free_bytes "$clone") memory=$(memory_to_use) count=$(core_count)
echo "This machine"
row "" processor "$(processor)"
row "" cores "$(cores_line)"
row "" memory "$(memory)"
row "" disk "$(gigabytes "$disk") free in $clone"
echo "To build and test for the CPU"
report demo test optional
echo "For GPUs"
report extra
echo "The README's two commands"
verdict demo 'demo' "about 1 minute" 0.3 1
verdict test 'demo|test' "5 minutes" 0.4 2
[ $works = yes ]
