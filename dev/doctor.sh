#!/bin/sh
# doctor.sh - reports this machine's cores, memory and disk, and the version of each library and tool, of MPI and of the
# GPU; the purpose of each missing component and how to get it; and whether make demo and make test will work.
# It tries each component (dev/components.sh) and asks no package manager.
#
#   make doctor
#
# Exit status: 0 if make demo and make test work, 1 if not.
set -u
here=$(dirname -- "$0")
. "$here/components.sh"
make_scratch
row() { printf '  %-8s %-14s %s\n' "$1" "$2" "$3"; }

echo "This machine"
row "" processor "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | grep -m 1 . || uname -m), $(nproc) cores"
row "" memory "$(awk '/^MemTotal/ { total = $2 } /^MemAvailable/ { free = $2 }
    END { printf "%.1f GB, of which %.1f GB are free", total / 1e6, free / 1e6 }' /proc/meminfo)"
row "" disk "$(df -P -k "$clone" | awk 'NR == 2 { printf "%.1f GB", $4 / 1e6 }') free in $clone"

echo "What this course uses"
examine demo test more chromium cluster gpu cuda | tee "$scratch/all" |
while IFS='|' read -r status said _ name who purpose packages; do
    case $status in
        0) row ok "$name" "$said"; continue ;;
        3) row skip "$name" "cannot run on this machine ($said); tests that need it are skipped"; continue ;;
    esac
    case $who in demo | test) row MISSING "$name" "$said" ;; *) row missing "$name" "$said" ;; esac
    row "" "" "for: $purpose"
    case $who in
        gpu) row "" "" "get: $packages" ;;
        cuda) row "" "" "get: sh dev/setup.sh --with-cuda; or pip install $packages" ;;
        chromium | cluster) row "" "" "get: sh dev/setup.sh --with-$who, or the packages $packages" ;;
        *) row "" "" "get: sh dev/setup.sh, or the packages $packages" ;;
    esac
done

# verdict COMMAND WHO TAKES: prints whether that command works, and if not, which components that match WHO are missing.
# On a machine with a GPU the Makefile builds for it.
verdict() {
    needed=$2 remedy="sh dev/setup.sh"
    if has "$nvcc" && nvidia-smi -L >/dev/null 2>&1; then
        needed="$needed|gpu|cuda" remedy="$remedy; or leave the GPU out: make DEVICE=cpu $1"
    fi
    # Without a compiler the others could not be tried.
    missing=$(awk -F '|' -v needed="^($needed)\$" '$1 == 1 && $5 ~ needed {
        printf "%s%s", separator, $4; separator = ", "; if ($3 == "compiler") exit }' "$scratch/all")
    if [ -z "$missing" ]; then row ok "make $1" "works here"
    else works=no && row NO "make $1" "does not work here: missing: $missing ($remedy)"; fi
    row "" "" "takes $3"
}
echo "The README's two commands"
works=yes
verdict demo demo "about 1 minute on two cores, 0.3 GB of disk and 1 GB of memory"
verdict test 'demo|test' "5 minutes on two cores, 0.4 GB of disk and 2 GB of memory"
[ $works = yes ]
