#!/bin/sh
# setup.sh - installs what is missing here and nothing else: by apt on Debian and Ubuntu, and elsewhere it prints the
# command to copy. What is missing is found by building and running small programs (dev/doctor/probes.sh), so whatever
# was installed in another way counts too, and a machine that has everything needs no rights and no network.
#
# Where nvcc is, so that programs for a GPU can be built, and one of NVIDIA's libraries for them is not, pip's wheels of
# these libraries are unpacked into nvidia/ beside this folder: about 1 GB, for this project alone.
#
#   sh dev/setup.sh
#
# Exit status: 0 if everything required is here at the end, 1 if not. What is for a GPU is never required.
set -u
here=$(dirname -- "$0")
probes=$here/doctor
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
. "$probes/probes.sh"

# Fills $scratch/missing with the table's lines for what is not here, and sets required_missing to their names.
look() {
    : >"$scratch/missing"
    components | grep -v '|extra|' >"$scratch/wanted"
    required_missing=
    while IFS='|' read -r key name class rest; do
        "probe_$key" >/dev/null 2>&1 </dev/null && continue
        echo "$key|$name|$class|$rest" >>"$scratch/missing"
        if [ "$class" = required ]; then required_missing="${required_missing:+$required_missing, }$name"; fi
    done <"$scratch/wanted"
}

say_missing() {
    while IFS='|' read -r key name class purpose rest; do
        if [ "$class" = required ]; then echo "missing: $name, needed for $purpose"
        else echo "missing: $name (optional); without it there is no: $purpose"; fi
    done <"$scratch/missing"
}

# packages COLUMN: the packages that one package manager has for what is missing, each once, on one line.
packages() { cut -d '|' -f "$1" "$scratch/missing" | tr -s ' ' '\n' | awk '!seen[$0]++' | paste -s -d ' ' -; }

# libFuzzer's run-time library must be of clang's own version; the package that has it is named differently from release
# to release. apt's Depends of clang tells the version where clang is not installed yet.
fuzzer_runtime() {
    if has "${CLANG:-clang}"; then version=$("${CLANG:-clang}" -dumpversion | cut -d . -f 1)
    else version=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -n 1); fi
    for package in "libclang-rt-$version-dev" "libclang-common-$version-dev"; do
        if has_candidate "$package"; then echo "$package"; return; fi
    done
    echo libclang-rt-dev
}
has_candidate() { LC_ALL=C apt-cache policy "$1" 2>/dev/null | grep -q '^ *Candidate: [^(]'; }

# Everything that apt must install.
apt_packages() {
    for package in $(packages 5); do
        if [ "$package" = libclang-rt-dev ]; then fuzzer_runtime; else echo "$package"; fi
    done | paste -s -d ' ' -
}

give_up() { # the command to copy...
    echo
    echo "To install it:"
    echo "    $*"
    [ -z "$required_missing" ] && { echo "What is missing is optional; the rest works without it."; exit 0; }
    exit 1
}

install_with_apt() {
    if [ "$(id -u)" = 0 ]; then as_root=
    elif has sudo && sudo -n true 2>/dev/null; then as_root="sudo -n"
    elif has sudo && [ -t 0 ]; then as_root=sudo # it asks for the password
    else give_up "su -c 'apt-get update && apt-get install -y --no-install-recommends $(apt_packages)'"; fi
    echo "fetching the package lists ..."
    $as_root apt-get update -q >"$scratch/log" 2>&1 || { tail -n 5 "$scratch/log"; echo "apt-get update failed; going on with the lists that are here" >&2; }
    chosen=
    for package in $(apt_packages); do
        if has_candidate "$package"; then chosen="$chosen $package"; else echo "this release has no package $package" >&2; fi
    done
    [ -n "$chosen" ] || return
    echo "installing:$chosen"
    # shellcheck disable=SC2086 # lists of words
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $chosen </dev/null >"$scratch/log" 2>&1 ||
        { tail -n 15 "$scratch/log"; echo "apt-get install failed: see above" >&2; }
}

# ---- for a GPU ----
# The wheels, as PyTorch 2.11 brings them for CUDA 13; for CUDA 12 they have other names. NVRTC must not be newer than what
# the driver knows, so it is of the toolkit's own version.
wheels() {
    if [ "${toolkit%.*}" -ge 13 ]; then
        echo "nvidia-cublas==13.1.0.3 nvidia-cudnn-cu13==9.19.0.56 nvidia-nccl-cu13==2.28.9 nvidia-cuda-nvrtc==$toolkit.*"
    else
        echo "nvidia-cublas-cu12 nvidia-cudnn-cu12 nvidia-nccl-cu12 nvidia-cuda-nvrtc-cu12==$toolkit.*"
    fi
}
# The Python that has pip: the one that is here, or a virtual environment of it.
python_with_pip() {
    if "${PYTHON:-python3}" -m pip --version >/dev/null 2>&1; then echo "${PYTHON:-python3}"; return; fi
    "${PYTHON:-python3}" -m venv "$scratch/venv" >/dev/null 2>&1 && echo "$scratch/venv/bin/python"
}
lacks_cuda_library() {
    for library in cublasLt cudnn nvrtc nccl; do
        sh "$here/find_cuda.sh" folder "$library" >/dev/null 2>&1 || { echo "$library"; return; }
    done
    return 1
}
fetch_cuda_libraries() {
    has "${NVCC:-nvcc}" && library=$(lacks_cuda_library) || return 0
    toolkit=$("${NVCC:-nvcc}" --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
    echo "missing: $library, for CUDA $toolkit on a GPU; fetching NVIDIA's libraries into nvidia/, about 1 GB ..."
    python=$(python_with_pip) || { echo "there is no pip: install python3-pip or python3-venv, then run this again" >&2; return; }
    # Unpacked beside and renamed: what is half there would be taken for all.
    rm -rf "$here/../nvidia.new"
    # shellcheck disable=SC2046 # a list of words
    if "$python" -m pip install -q --no-deps --target "$here/../nvidia.new" $(wheels) >"$scratch/log" 2>&1; then
        rm -rf "$here/../nvidia"
        mv "$here/../nvidia.new/nvidia" "$here/../nvidia"
        rm -rf "$here/../nvidia.new"
    else
        tail -n 5 "$scratch/log" >&2
        echo "NVIDIA's libraries could not be fetched; make DEVICE=cuda will not work, the rest does" >&2
        rm -rf "$here/../nvidia.new"
    fi
}

look
if [ ! -s "$scratch/missing" ]; then echo "everything is here"
else
    say_missing
    if has apt-get; then install_with_apt
    elif has dnf; then give_up "sudo dnf install $(packages 6)"
    elif has pacman; then give_up "sudo pacman -S --needed $(packages 7)"
    elif has brew; then give_up "brew install $(packages 8)"
    else give_up "(no apt, dnf, pacman or brew here; Debian's names are) $(packages 5)"; fi
    look
    if [ ! -s "$scratch/missing" ]; then echo "everything is here now"
    else
        echo "still missing after the installation:"
        say_missing
    fi
fi
fetch_cuda_libraries
[ -z "$required_missing" ]
