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
. "$here/doctor/probes.sh"
make_scratch

row() { printf '  %-8s %-14s %s\n' "$1" "$2" "$3"; }

# ---- this machine; PROC and CGROUP are for tests ----
# The processor, and the vector instructions that the compiler uses with $for_arch, as far as they matter for speed.
processor() {
    model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)
    printf %s "${model:-$(uname -m)}"
    macros=$($cc $for_arch -dM -E - </dev/null 2>/dev/null)
    for name in AVX2 AVX512F AVX512_BF16 AVX512BF16 AMX_BF16 ARM_NEON ARM_FEATURE_SVE ARM_FEATURE_BF16; do
        case $macros in *" __${name}__ "*) printf ', %s' $name ;; esac
    done
    echo
}
meminfo() { # KEY: in bytes
    kilobytes=$(sed -n "s/^$1: *\([0-9]*\) kB.*/\1/p" "${PROC:-/proc}/meminfo" 2>/dev/null)
    echo ${kilobytes:+$((kilobytes * 1024))}
}
# Sets `limit` to a container's limit in bytes, or to nothing; `memory` to what a program may use, or to nothing if it is not known;
# `quota` to ten times the container's share of the cores, or to nothing. Programs do not see that share: they start a thread per
# core, and these wait for each other.
read_limits() {
    limit= quota= available=$(meminfo MemAvailable)
    read -r limit 2>/dev/null <"${CGROUP:-/sys/fs/cgroup}/memory.max" && [ "$limit" != max ] || limit=
    memory=${available:-$limit}
    [ -z "$limit" ] || [ "$limit" -ge "$memory" ] || memory=$limit
    read -r share period 2>/dev/null <"${CGROUP:-/sys/fs/cgroup}/cpu.max" && [ "$share" != max ] || return
    quota=$(((share * 10 + period / 2) / period))
}
whole() { if [ "$1" -lt 20 ]; then echo 1; else echo $(($1 / 10)); fi; } # TENTHS, but at least one
this_machine() {
    row "" processor "$(processor)"
    row "" cores "$cores${quota:+; this container may use $(tenths "$quota") of them: set OMP_NUM_THREADS=$(whole "$quota")}"
    total=$(meminfo MemTotal)
    [ -z "$total" ] || total="$(gigabytes "$total"), of which $(gigabytes "$available") are free"
    row "" memory "${total:-not known: there is no /proc/meminfo}${limit:+ (this container may use $(gigabytes "$limit"))}"
    row "" disk "$(gigabytes "$disk") free in $clone"
}

# ---- components ----
# report CLASS...: a row for every component of these classes. Appends "CLASS KEY STATUS NAME" of what does not work to
# $scratch/lacking.
report() {
    for class in "$@"; do components | grep -F "|$class|"; done >"$scratch/wanted"
    while IFS='|' read -r key name class purpose how _; do
        found=$("probe_$key" 2>/dev/null </dev/null)
        status=$?
        if [ $status = 0 ]; then
            echo "$found" | while read -r line; do row ok "$name" "$line"; done
            continue
        fi
        if [ $status = 3 ]; then row skip "$name" "cannot run on this machine ($found); tests that need it are skipped"; continue; fi
        echo "$class $key $status $name" >>"$scratch/lacking"
        if [ $status = 2 ]; then word=UNUSABLE; elif is_required "$class"; then word=MISSING; else word=missing; fi
        row $word "$name" "$found"
        row "" "" "for: $purpose"
        if [ "$class" = extra ]; then row "" "" "get: $how"
        elif [ $status = 1 ]; then row "" "" "get: sh dev/setup.sh, or the packages $how"; fi
    done <"$scratch/wanted"
}
lacks() { grep -q "^[a-z]* $1 " "$scratch/lacking"; } # KEY
# are_missing PATTERN: the names of what the lines of $scratch/those with the pattern say, and "is missing" or "are missing".
names() { grep -E "$1" "$scratch/those" | cut -d ' ' -f 4- | paste -s -d ',' - | sed 's/,/, /g'; }
are_missing() { case $1 in *,*) echo "$1 are missing" ;; *) echo "$1 is missing" ;; esac; }

# ---- the README's two commands ----
# Returns 0 if 4 processes can be started as make demo starts its ranks; otherwise prints why not.
starts_ranks() {
    fail() { echo "$*"; exit 1; }
    . "$here/on_ranks.sh"
    ranks_launcher 4
    # shellcheck disable=SC2086 # a command and its options
    said=$(attempt $launcher -np 4 true) || fail "$launcher does not start 4 ranks ($said); MPIRUN may name another launcher"
}
# what_lacks CLASSES COMMAND: which components of these classes (a pattern) are lacking, in words, and of the GPU build, which the
# Makefile makes where there is a GPU. Without a compiler nothing else could be tried.
what_lacks() {
    if lacks compiler; then wanted=' compiler '; else wanted="^($1) "; fi
    grep -E "$wanted" "$scratch/lacking" >"$scratch/those"
    missing=$(names ' 1 ') unusable=$(names ' 2 ')
    [ -z "$missing" ] || echo "$(are_missing "$missing") (sh dev/setup.sh)"
    [ -z "$unusable" ] || echo "$unusable cannot be used, for the reason above"
    if has "$nvcc" && nvidia-smi -L >/dev/null 2>&1; then
        cp "$scratch/lacking" "$scratch/those"
        missing=$(names ' (nvcc|cublaslt|cudnn|nccl) ')
        [ -z "$missing" ] || echo "$(are_missing "$missing") for the GPU (see above; make GPU= $2 leaves the GPU out)"
    fi
}
less() { [ -n "$1" ] && [ "$1" -lt "$2" ]; }
# verdict COMMAND CLASSES TIME DISK MEMORY: two rows; the time is on two cores, the disk in bytes, the memory in GB.
verdict() {
    {
        what_lacks "$2" "$1"
        if [ "$1" = demo ] && ! lacks compiler && ! lacks mpi; then ( starts_ranks ); fi
        if [ -n "$not_writable" ]; then echo "$not_writable"
        elif less "$disk" "$4"; then echo "only $(gigabytes "$disk") are free in $clone, and it needs about $(gigabytes "$4")"; fi
    } >"$scratch/reasons"
    if [ -s "$scratch/reasons" ]; then
        works=no
        row NO "make $1" "does not work here: $(head -n 1 "$scratch/reasons")"
        sed 1d "$scratch/reasons" | while read -r line; do row "" "" "and $line"; done
    elif less "$memory" "$5000000000"; then
        row "?" "make $1" "may not work here: $(gigabytes "$memory") of memory can be used, and it needs about $5 GB"
    else
        without=
        if [ "$1" = demo ] && lacks gnuplot; then without=", without its plot: gnuplot is missing (sh dev/setup.sh)"; fi
        row ok "make $1" "works here$without"
    fi
    row "" "" "takes $3 on two cores$count, $(gigabytes "$4") of disk and $5 GB of memory"
}

: >"$scratch/lacking"
works=yes
cores=$(run_c MACHINE -fopenmp) || cores="$(getconf _NPROCESSORS_ONLN) cores"
not_writable=$(clone_is_writable "$clone/build" "$clone/data")
disk=$(free_bytes "$clone")
read_limits
if [ -n "$quota" ]; then count=$(whole "$quota"); else count=${cores%% *}; fi
case $count in
    *[!0-9]*|'') count= ;;
    1) count=" (this machine has 1, so about twice that)" ;;
    *) count=" (this machine has $count)" ;;
esac
echo "This machine"
this_machine
echo "To build and test for the CPU"
report demo test optional
echo "For GPUs"
report extra
echo "The README's two commands"
verdict demo 'demo' "about 1 minute" 300000000 1
verdict test 'demo|test' "5 minutes" 400000000 2
[ $works = yes ]
