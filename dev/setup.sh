#!/bin/sh
# setup.sh - installs what `make demo` and `make test` need and this machine lacks: with apt on Debian and Ubuntu; elsewhere it
# prints the command to copy. It finds out what is missing by building and running small programs (dev/doctor/probes.sh). Software
# that was installed in another way therefore counts, and a complete machine needs neither root's rights nor a network.
#
#   sh dev/setup.sh                   everything except the following parts
#   sh dev/setup.sh --with-cuda       also NVIDIA's libraries, if nvcc is installed: pip's wheels, about 1 GB, unpacked into
#                                     nvidia/ in this clone. A machine with nvcc and a GPU gets them without this option
#   sh dev/setup.sh --with-chromium   also Chromium, which is large: make test-all tests the pages of make site in it
#   sh dev/setup.sh --with-cluster    also sshd and Slurm, for make cluster. Debian then also starts an sshd for this machine
#
# Exit status: 0 if the two commands can work and make can write into this clone, 1 if not. Optional parts never count. After a
# failure everything that was installed stays, and a second run continues from there.
set -u
here=$(dirname -- "$0")
without="chromium cluster" with_cuda=
for option; do
    case $option in
        --with-chromium | --with-cluster) without=$(echo "$without" | sed "s/${option#--with-}//") ;;
        --with-cuda) with_cuda=yes ;;
        -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit ;;
        *)
            near=$(sh "$here/nearest.sh" "$option" --with-cuda --with-chromium --with-cluster --help)
            echo "error: setup.sh has no option '$option'; ${near:+did you mean $near? }--help lists its options" >&2
            exit 1 ;;
    esac
done
. "$here/doctor/probes.sh"
make_scratch

# Writes the lines of missing components to $scratch/missing, and the reason for each to $scratch/why.KEY. Sets required_missing
# to the names of those that the two commands need.
look() {
    : >"$scratch/missing"
    components | grep -v '|extra|' | grep -vE "^($(echo $without | tr ' ' '|'))[|]" >"$scratch/wanted"
    required_missing=
    while IFS='|' read -r key name class others; do
        "probe_$key" >"$scratch/why.$key" 2>/dev/null </dev/null
        case $? in
            0) continue ;;
            2) unusable=,unusable ;;
            3)
                [ -e "$scratch/said.$key" ] || echo "$name: cannot run on this machine ($(head -n 1 "$scratch/why.$key")); tests that need it are skipped"
                : >"$scratch/said.$key"
                continue ;;
            *) unusable= ;;
        esac
        echo "$key|$name|$class$unusable|$others" >>"$scratch/missing"
        if is_required "$class"; then required_missing="$required_missing $name"; fi
    done <"$scratch/wanted"
}
say_missing() { # [why]
    while IFS='|' read -r key name class purpose _; do
        why=$(head -n 1 "$scratch/why.$key")
        case $class in
            *,unusable) echo "not usable: $name, needed for $purpose: $why" ;; # apt rarely helps, so say why at once
            optional) echo "missing: $name (optional), needed for $purpose${1:+: $why}" ;;
            *) echo "missing: $name, needed for $purpose${1:+: $why}" ;;
        esac
    done <"$scratch/missing"
}

# libFuzzer's run-time library must have clang's version, and its package has another name in every release. Where clang is
# not installed yet, the version is that of the package clang depends on.
fuzzer_runtime() {
    if has "$clang"; then release=$("$clang" -dumpversion | cut -d . -f 1)
    else release=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -n 1); fi
    for package in "libclang-rt-$release-dev" "libclang-common-$release-dev"; do
        if has_candidate "$package"; then echo "$package"; return; fi
    done
    echo libclang-rt-dev
}
has_candidate() { LC_ALL=C apt-cache policy "$1" 2>/dev/null | grep -q '^ *Candidate: [^(]'; }
# packages COLUMN [CLASSES]: one package manager's names of the missing packages, each once, on one line. Required ones come
# first, because the optional ones are much larger and may not fit on the disk.
packages() {
    chosen=
    for class in ${2-demo,test optional}; do
        for package in $(grep -E "^[^|]*\|[^|]*\|($(echo "$class" | tr , '|'))[,|]" "$scratch/missing" | cut -d '|' -f "$1"); do
            case $package in
                libclang-rt-dev) package=$(fuzzer_runtime) ;;
                libomp-dev) case $($cc --version 2>/dev/null) in *clang*) ;; *) continue ;; esac ;; # gcc has an OpenMP of its own
            esac
            case " $chosen " in *" $package "*) ;; *) chosen="$chosen${chosen:+ }$package" ;; esac
        done
    done
    echo "$chosen"
}

# by_hand REASON COMMAND: why nothing is installed, and the command to copy.
by_hand() { printf '%s\n    %s\n' "$1" "$2" >&2; return 1; }
# explain LINE: prints that line, then the errors and warnings in $scratch/log, or its last lines if it contains none.
explain() {
    echo "$1" >&2
    grep -E '^ *(E|W|ERROR|dpkg|sudo): ' "$scratch/log" >"$scratch/errors" || grep . "$scratch/log" >"$scratch/errors"
    tail -n 4 "$scratch/errors" | cut -c 1-200 | sed 's/^/    /' >&2
    return 1
}
# Why a command failed, from $scratch/log, and what to do.
reason() {
    said() { grep -qiE "$1" "$scratch/log"; }
    if said 'no space left|enough free space|disk quota'; then echo "a disk is full; free some space (df -h shows where)"
    elif said 'could not get lock|unable to acquire|unable to lock'; then
        echo "another program is installing packages; wait until it has finished"
    elif said 'dpkg was interrupted'; then echo "an earlier installation was interrupted; run dpkg --configure -a as root"
    elif said 'resolving|name resolution|resolve host|could not connect|unable to connect|cannot initiate' ||
        said 'unreachable|timed out|connection refused|max retries'; then
        echo "no network; check it (behind a proxy, set http_proxy and https_proxy)"
    else echo "see below"; fi
}

# Sets as_root to the words that give a command root's rights. If there is no way, says so and returns 1.
become_root() {
    line="apt-get update && apt-get install -y --no-install-recommends $(packages 5)"
    if [ "$(id -u)" = 0 ]; then as_root=
    elif ! has sudo; then
        by_hand "only root may install packages, and there is no sudo here; with root's password, run:" "su -c '$line'"
    elif sudo -n true 2>/dev/null; then as_root="sudo -n"
    elif ! [ -t 0 ]; then
        by_hand "sudo wants a password, and there is no terminal to type it in; in a terminal, run:" "sudo sh -c '$line'"
    elif sudo -v; then as_root=sudo
    else by_hand "sudo does not let $(id -un) install packages; ask an administrator to run:" "$line"
    fi
}
# shellcheck disable=SC2086 # sudo and its options, and lists of packages
install_with_apt() {
    become_root || return 1
    lists="without new package lists, apt knows no package" unknown=
    echo "fetching the package lists ..."
    # Without a network its status is 0, and it only warns.
    if $as_root env LC_ALL=C apt-get update -q </dev/null >"$scratch/log" 2>&1 &&
        ! grep -q '^W: .*ailed to \(fetch\|download\)' "$scratch/log"; then lists="this release has no package"
    else explain "apt-get update failed: $(reason). Going on with the package lists that are here"
    fi
    for classes in demo,test optional; do
        known=
        for package in $(packages 5 $classes); do
            if has_candidate "$package"; then known="$known $package"; else unknown="$unknown $package"; fi
        done
        [ -n "$known" ] || continue
        echo "installing:$known"
        $as_root env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $known \
            </dev/null >"$scratch/log" 2>&1 && continue
        explain "apt-get install failed: $(reason). Then run sh dev/setup.sh again"
        break
    done
    case $unknown/$lists in
        /*) ;;
        */this*) echo "$lists$unknown: install it in another way" >&2 ;;
        *) echo "$lists$unknown" >&2 ;;
    esac
}
# with_admin COMMAND: how this user runs it with root's rights.
with_admin() { if [ "$(id -u)" = 0 ]; then echo "$1"; elif has sudo; then echo "sudo $1"; else echo "su -c '$1'"; fi; }
# Returns 1 if nothing could be tried.
install_missing() {
    only_apt="this script installs with apt only; here, run:"
    if has apt-get; then install_with_apt
    elif has dnf; then by_hand "$only_apt" "$(with_admin "dnf install $(packages 6)")"
    elif has pacman; then by_hand "$only_apt" "$(with_admin "pacman -S --needed $(packages 7)")"
    elif has brew; then by_hand "$only_apt" "brew install $(packages 8)"
    else by_hand "there is no apt-get, dnf, pacman or brew here; install these in this system's way (the names are Debian's):" \
        "$(packages 5)"
    fi
}

# ---- for a GPU ----
# The versions that PyTorch 2.11 uses with CUDA 13; for CUDA 12 the wheels have other names. NVRTC must not be newer than the
# driver supports, so it has the toolkit's version.
wheels() {
    if [ "${toolkit%.*}" -ge 13 ]; then
        echo "nvidia-cublas==13.1.0.3 nvidia-cudnn-cu13==9.19.0.56 nvidia-nccl-cu13==2.28.9 nvidia-cuda-nvrtc==$toolkit.*"
    else
        echo "nvidia-cublas-cu12 nvidia-cudnn-cu12 nvidia-nccl-cu12 nvidia-cuda-nvrtc-cu12==$toolkit.*"
    fi
}
# A Python with pip: the one that is here, or a virtual environment made by it.
python_with_pip() {
    if "$python" -m pip --version >/dev/null 2>&1; then echo "$python"; return; fi
    "$python" -m venv "$scratch/venv" >/dev/null 2>&1 && echo "$scratch/venv/bin/python"
}
lacks_cuda_library() {
    for library in cublasLt cudnn nvrtc nccl; do
        sh "$here/find_cuda.sh" folder "$library" >/dev/null 2>&1 || { echo "$library"; return; }
    done
    return 1
}
fetch_cuda_libraries() {
    # make builds for the GPU only if both are installed.
    [ -n "$with_cuda" ] || { has "$nvcc" && nvidia-smi -L >/dev/null 2>&1; } || return 0
    has "$nvcc" || { echo "--with-cuda: there is no $nvcc; install NVIDIA's CUDA Toolkit first (developer.nvidia.com/cuda-downloads)" >&2; return; }
    library=$(lacks_cuda_library) || return 0
    toolkit=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
    why=$(clone_is_writable "$clone/nvidia") || { echo "missing: $library, for GPUs; not fetched, because $why" >&2; return; }
    echo "missing: $library, for CUDA $toolkit; fetching NVIDIA's libraries into nvidia/, about 1 GB ..."
    pip=$(python_with_pip) || { echo "there is no pip: install python3-pip or python3-venv, then run this again" >&2; return; }
    # Unpacked under another name and renamed, so that nvidia/ is never half full.
    rm -rf "$clone/nvidia.new"
    # shellcheck disable=SC2046 # a list of words
    if "$pip" -m pip install -q --no-deps --target "$clone/nvidia.new" $(wheels) >"$scratch/log" 2>&1; then
        rm -rf "$clone/nvidia"
        mv "$clone/nvidia.new/nvidia" "$clone/nvidia"
    else explain "pip install failed: $(reason). Without NVIDIA's libraries make DEVICE=cuda does not work; the rest does"
    fi
    rm -rf "$clone/nvidia.new"
}

look
if [ ! -s "$scratch/missing" ]; then echo "everything is here"
else
    say_missing
    if install_missing; then
        look
        if [ ! -s "$scratch/missing" ]; then echo "everything is here now"
        else
            echo "still missing or not usable:"
            say_missing why
        fi
    fi
    if [ -s "$scratch/missing" ] && [ -z "$required_missing" ]; then
        echo "what is missing is optional; the rest works without it"
    fi
fi
fetch_cuda_libraries
why=$(clone_is_writable "$clone/build" "$clone/data") || { echo "make cannot build here: $why" >&2; exit 1; }
[ -z "$required_missing" ]
