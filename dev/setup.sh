#!/bin/sh
# setup.sh - installs what `make demo` and `make test` need and this machine lacks: with apt on Debian and Ubuntu;
# elsewhere it lists what to install. It finds out what is missing by building and running small programs
# (dev/components.sh). Software that was installed in another way therefore counts, and a complete machine needs neither
# root's rights nor a network.
#
#   sh dev/setup.sh                   everything except the following parts
#   sh dev/setup.sh --with-cuda       also NVIDIA's libraries, if nvcc is installed: pip's wheels, about 1 GB, unpacked
#                                     into nvidia/ in this clone. With nvcc and a GPU that is the default
#   sh dev/setup.sh --with-chromium   also Chromium, which is large: make test-all tests the pages of make site in it
#   sh dev/setup.sh --with-cluster    also sshd and Slurm, for make cluster. Debian then starts an sshd for this machine
#
# Exit status: 0 if the two commands can work, 1 if not. Optional parts never count. After a failure everything that was
# installed stays, and a second run continues from there.
set -u
here=$(dirname -- "$0")
wanted="demo test more" with_cuda=
for option; do
    case $option in
        --with-chromium | --with-cluster) wanted="$wanted ${option#--with-}" ;;
        --with-cuda) with_cuda=yes ;;
        -h | --help) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit ;;
        *) echo "error: setup.sh has no option '$option'; --help lists its options" >&2; exit 1 ;;
    esac
done
. "$here/components.sh"
make_scratch

# Writes the lines of missing components to $scratch/missing. Succeeds if there are none.
look() {
    # shellcheck disable=SC2086 # a list of words
    examine $wanted >"$scratch/all"
    grep '^1' "$scratch/all" >"$scratch/missing"
    [ ! -s "$scratch/missing" ]
}
say_missing() {
    while IFS='|' read -r _ said _ name who purpose _; do
        case $who in demo | test) ;; *) name="$name (optional)" ;; esac
        echo "missing: $name, needed for $purpose: $said"
    done <"$scratch/missing"
}
packages() { # WHO, a pattern: Debian's packages of the missing components, each once
    awk -F '|' -v who="^($1)\$" '$5 ~ who { print $7 }' "$scratch/missing" | tr ' ' '\n' | awk '!seen[$0]++' |
        paste -s -d ' ' -
}
# as_root COMMAND...: on failure prints its errors and warnings, or its last lines.
as_root() {
    # shellcheck disable=SC2086 # one word or none
    $sudo env LC_ALL=C DEBIAN_FRONTEND=noninteractive "$@" </dev/null >"$scratch/log" 2>&1 && return
    explain "$1 $2 failed:"
}
explain() { # LINE
    echo "$1" >&2
    grep -E '^ *(E|W|ERROR|dpkg): ' "$scratch/log" >"$scratch/errors" || cp "$scratch/log" "$scratch/errors"
    tail -n 4 "$scratch/errors" | cut -c 1-200 | sed 's/^/    /' >&2
    return 1
}
# Returns 1 if nothing could be tried.
install_missing() {
    sudo=
    has apt-get || return 1
    if [ "$(id -u)" != 0 ]; then has sudo && sudo true && sudo=sudo || return 1; fi
    echo "fetching the package lists ..."
    as_root apt-get update -q -o APT::Update::Error-Mode=any # otherwise it succeeds without a network
    # Required ones first, because the others are much larger and may not fit on the disk.
    for who in 'demo|test' 'more|chromium|cluster'; do
        known=
        for package in $(packages "$who"); do
            ! LC_ALL=C apt-cache policy "$package" | grep -q '^ *Candidate: [^(]' || known="$known $package"
        done
        [ -n "$known" ] || continue
        echo "installing:$known"
        # shellcheck disable=SC2086 # a list of words
        as_root apt-get install -y -q --no-install-recommends $known || break
    done
    return 0
}

# ---- for a GPU ----
# The versions that PyTorch 2.11 uses with CUDA 13; for CUDA 12 the wheels have other names. NVRTC must not be newer
# than the driver supports, so it has the toolkit's version.
wheels() {
    if [ "${toolkit%.*}" -ge 13 ]; then
        echo "nvidia-cublas==13.1.0.3 nvidia-cudnn-cu13==9.19.0.56 nvidia-nccl-cu13==2.28.9" \
            "nvidia-cuda-nvrtc==$toolkit.*"
    else
        echo "nvidia-cublas-cu12 nvidia-cudnn-cu12 nvidia-nccl-cu12 nvidia-cuda-nvrtc-cu12==$toolkit.*"
    fi
}
fetch_cuda_libraries() {
    # make builds for the GPU only if both are installed.
    [ -n "$with_cuda" ] || { has "$nvcc" && nvidia-smi -L >/dev/null 2>&1; } || return 0
    if ! has "$nvcc"; then
        echo "--with-cuda: there is no $nvcc; first install the CUDA Toolkit (developer.nvidia.com/cuda-downloads)" >&2
        return
    fi
    sh "$here/find_cuda.sh" folder cublasLt cudnn nvrtc nccl >/dev/null 2>&1 && return
    toolkit=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
    # Debian's Python has no pip, but makes environments that have one.
    pip=$python
    if ! "$pip" -m pip --version >/dev/null 2>&1; then
        pip=$scratch/venv/bin/python
        "$python" -m venv "$scratch/venv" >/dev/null 2>&1 ||
            { echo "NVIDIA's libraries need pip: install python3-pip or python3-venv" >&2; return; }
    fi
    echo "fetching NVIDIA's libraries for CUDA $toolkit into nvidia/, about 1 GB ..."
    # Unpacked under another name and renamed, so that nvidia/ is never half full.
    rm -rf "$clone/nvidia.new"
    # shellcheck disable=SC2046 # a list of words
    if "$pip" -m pip install -q --no-deps --target "$clone/nvidia.new" $(wheels) >"$scratch/log" 2>&1; then
        rm -rf "$clone/nvidia"
        mv "$clone/nvidia.new/nvidia" "$clone/nvidia"
    else explain "pip install failed, and without NVIDIA's libraries make DEVICE=cuda does not work; the rest does:"
    fi
    rm -rf "$clone/nvidia.new"
}

if look; then echo "everything is here"
else
    say_missing
    if install_missing; then
        if look; then echo "everything is here now"; else echo "still missing:" && say_missing; fi
    fi
    if [ -s "$scratch/missing" ]; then
        echo "install these as root, in this system's way (the names are Debian's):"
        echo "    $(packages '.*')"
    fi
fi
grep '^3' "$scratch/all" | while IFS='|' read -r _ said _ name _; do
    echo "$name: cannot run on this machine ($said); tests that need it are skipped"
done
fetch_cuda_libraries
! grep -qE '^1(\|[^|]*){3}\|(demo|test)\|' "$scratch/missing"
