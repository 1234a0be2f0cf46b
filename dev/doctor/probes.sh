# probes.sh - what this project needs, and how to find out whether a machine has it. Sourced by setup.sh and doctor.sh, which set
# `here` to dev/; make_scratch sets `scratch` to a temporary folder.
#
# No package manager is asked: a library is present if a program that uses it compiles, links, runs and gets the right answer, with
# the Makefile's flags. CC, CPPFLAGS, LDFLAGS, CLANG, NVCC, MPICC, MPIRUN and PYTHON say what to use, as in the Makefile.

# One line per component: key | name | class | what it is for | packages of apt | of dnf | of pacman | of brew
#   demo      make demo and make test need it
#   test      make test needs it
#   optional  something does not work without it, and the fourth column says what; setup.sh installs it all the same
#   extra     for GPUs: doctor.sh reports it, setup.sh does not install it; the fifth column says how to get it
# A new component is a line here and a function probe_KEY below, which prints the version, or what is wrong. Its status is 0 if the
# component works, 1 if it is missing, 2 if it is installed but cannot be used, and 3 if it cannot run on this kind of machine and
# everything else works without it.
components() {
    sed -e 's/ *| */|/g' <<'END'
compiler  | C compiler    | demo     | building everything                               | gcc libc6-dev   | gcc               | gcc     | gcc
make      | make          | demo     | building everything                               | make            | make              | make    | make
openmp    | OpenMP        | demo     | using more than one core                          | gcc libomp-dev  | libgomp           | gcc     | libomp
onednn    | oneDNN        | demo     | matrix products on the CPU                        | libdnnl-dev     | onednn-devel      | onednn  | onednn
jansson   | Jansson       | demo     | checkpoints and tokenizers (JSON)                 | libjansson-dev  | jansson-devel     | jansson | jansson
pcre2     | PCRE2         | demo     | GPT-2's tokenizer                                 | libpcre2-dev    | pcre2-devel       | pcre2   | pcre2
cmocka    | cmocka        | test     | make test                                         | libcmocka-dev   | libcmocka-devel   | cmocka  | cmocka
mpi       | Open MPI      | demo     | runs of more than one rank                        | libopenmpi-dev openmpi-bin | openmpi-devel | openmpi | open-mpi
pytest    | pytest        | test     | make test                                         | python3-pytest python3-pytest-xdist python3-numpy | python3-pytest python3-pytest-xdist python3-numpy | python-pytest python-pytest-xdist python-numpy | python numpy
tools     | pgrep, git    | test     | make test                                         | procps git iproute2 e2fsprogs | procps-ng git iproute e2fsprogs | procps-ng git iproute2 e2fsprogs | git
sanitizer | sanitizers    | test     | make test, DEBUG=1                                | gcc             | libasan libubsan libtsan | gcc | gcc
fuzzer    | fuzzer        | optional | make fuzz, and the fuzzing in make test-all    | clang libclang-rt-dev | clang compiler-rt | clang compiler-rt | llvm
gnuplot   | gnuplot       | optional | the plots of make demo                            | gnuplot-nox     | gnuplot-minimal   | gnuplot | gnuplot
curl      | curl          | optional | the download scripts under dev/data, and their test | curl ca-certificates | curl           | curl    | curl
ccache    | ccache        | optional | faster recompilation                              | ccache          | ccache            | ccache  | ccache
python    | Python + venv | optional | make lab, bench, experiments, site, tables of make demo; Hugging Face's libraries in make test-all | python3 python3-venv | python3 | python  | python
chromium  | Chromium      | optional | the pages of make site, tested (setup.sh --with-chromium) | chromium        | chromium          | chromium | chromium
cluster   | sshd, Slurm   | optional | make cluster (setup.sh --with-cluster)             | openssh-server openssh-client iproute2 slurmctld slurmd slurm-client munge | openssh-server openssh-clients iproute slurm-slurmctld slurm-slurmd munge | openssh iproute2 slurm-llnl munge |
nvcc      | CUDA toolkit  | extra    | the GPU build                                     | NVIDIA's CUDA Toolkit (developer.nvidia.com/cuda-downloads)
gpu       | GPU           | extra    | running the GPU build                             | an NVIDIA GPU, and its driver
cublaslt  | cuBLASLt      | extra    | matrix products on the GPU                        | sh dev/setup.sh --with-cuda; or pip install nvidia-cublas; it is part of the CUDA Toolkit
cudnn     | cuDNN         | extra    | the fastest attention on the GPU                  | sh dev/setup.sh --with-cuda; or pip install nvidia-cudnn-cu13; or NVIDIA's package repository
nvrtc     | NVRTC         | extra    | cuDNN, which compiles its kernels with it         | sh dev/setup.sh --with-cuda; or pip install nvidia-cuda-nvrtc; it is part of the CUDA Toolkit
nccl      | NCCL          | extra    | several GPUs                                      | sh dev/setup.sh --with-cuda; or pip install nvidia-nccl-cu13; or NVIDIA's package repository
END
}

clone=$(cd "$here/.." && pwd)
# The Makefile's default.
case $(uname -m) in aarch64 | arm64) for_arch=-mcpu=native ;; *) for_arch=-march=native ;; esac
cc=${CC:-cc} nvcc=${NVCC:-nvcc} clang=${CLANG:-clang} python=${PYTHON:-python3}

is_required() { [ "$1" = demo ] || [ "$1" = test ]; }
has() { command -v "$1" >/dev/null 2>&1; }
needs() { has "$1" || { echo "no $1"; return 1; }; } # PROGRAM: the same, with a message

tenths() { echo "$(($1 / 10)).$(($1 % 10))"; }
gigabytes() { echo "$(tenths $((($1 / 1000000 + 50) / 100))) GB"; }
free_bytes() { df -P -k "$1" 2>/dev/null | { read -r _ && read -r _ _ _ free _ && echo $((free * 1024)); }; }

# can_write FOLDER [REMEDY]: returns 0 if a file of 1 MB can be written there, otherwise prints why not, and what to do.
# shellcheck disable=SC2012 # stat has other options on other systems
can_write() {
    [ -d "$1" ] || { echo "there is no folder $1: $2"; return 1; }
    if trial=$(LC_ALL=C mktemp "$1/.trial.XXXXXX" 2>&1); then
        dd if=/dev/zero of="$trial" bs=65536 count=16 2>/dev/null && rm "$trial" && return
        rm -f "$trial"
        trial="No space"
    fi
    me=$(id -un) owner=$(ls -ld "$1" | { read -r _ _ owner _ && echo "$owner"; })
    case $trial in
        *"No space"* | *uota*)
            why="the disk that holds $1 is full ($(gigabytes "$(free_bytes "$1")") free)"
            remedy="free some space there, or clone onto another disk" ;;
        *"Read-only"*) why="$1 is on a read-only file system" remedy="clone onto another disk" ;;
        *) why="$1 is write-protected" remedy="run chmod u+w $1, or clone into another folder"
            if [ "$owner" != "$me" ]; then
                why="$1 belongs to $owner, and $me may not write there"
                remedy="run sudo chown -R $me $1, or clone into a folder of your own"
            fi ;;
    esac
    echo "$why: ${2:-$remedy}"
    return 1
}
# clone_is_writable [FOLDER...]: the same of the clone, and of these folders of it where they exist.
clone_is_writable() {
    for folder in "$clone" "$@"; do
        [ ! -d "$folder" ] || can_write "$folder" || return 1
    done
}
# make_scratch: sets scratch to a temporary folder, or ends the script if programs cannot be built and run there.
make_scratch() {
    tmp=${TMPDIR:-/tmp}
    can_write "$tmp" "set TMPDIR to a folder that has room" >&2 && scratch=$(mktemp -d) || exit 1
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\n' >"$scratch/run"
    chmod +x "$scratch/run"
    "$scratch/run" 2>/dev/null && return
    echo "programs cannot be run in $tmp (is it mounted noexec?): set TMPDIR to another folder" >&2
    exit 1
}

# The most informative line that a compiler, linker or loader printed.
complaint() {
    grep -m 1 -E 'error|cannot|not found|undefined' "$scratch/log" | sed -e 's/.*error: //' -e 's/^.*ld: //' -e 's/^==[0-9]*==//' | cut -c 1-150 | grep . ||
        grep -m 1 '[a-z]' "$scratch/log" | cut -c 1-150 | grep . || echo "it failed and printed nothing"
}
# attempt COMMAND...: prints its output, or why it failed. A command that hangs has failed.
attempt() {
    if has timeout; then set -- timeout 30 "$@"; fi
    if "$@" >"$scratch/out" 2>"$scratch/log"; then cat "$scratch/out"; return; fi
    if [ -s "$scratch/out" ]; then cat "$scratch/out"; else complaint; fi
    return 1
}
# build COMPILER SOURCE FLAGS...: compiles and links a program beside this file into $scratch/probe.
# shellcheck disable=SC2086 # compilers and flags are lists of words
build() {
    compiler=$1 source=$2
    shift 2
    needs "${compiler%% *}" || return 1
    $compiler ${CPPFLAGS-} "$here/doctor/$source" -o "$scratch/probe" ${LDFLAGS-} "$@" >"$scratch/log" 2>&1 || { complaint; return 1; }
}
# run_c NAME FLAGS...: builds that part of probe.c, and runs it. Returns 1 if it cannot be built, 2 if it fails.
run_c() { part=$1; shift; build "$cc" probe.c "-DPROBE_$part" "$@" || return 1; attempt "$scratch/probe" || return 2; }
# quietly COMMAND...: prints the first line of its output, and only if it fails.
quietly() { "$@" >"$scratch/said" || { status=$?; head -n 1 "$scratch/said"; return $status; }; }
# version PROGRAM SCRIPT: what sed makes of its --version.
version() { needs "$1" && attempt "$1" --version | sed -n "$2" | grep .; }

# The Makefile's options. Only compiled with -fopenmp: linking that is probe_openmp's.
# shellcheck disable=SC2086
probe_compiler() {
    needs "${cc%% *}" || return 1
    if ! $cc -std=c11 -O3 $for_arch -ffp-contract=off -fno-math-errno -fopenmp -Wall -Wextra -Werror=implicit-function-declaration ${CPPFLAGS-} -DPROBE_COMPILER \
        -c "$here/doctor/probe.c" -o "$scratch/compiler.o" >"$scratch/log" 2>&1; then
        why=$(complaint)
        printf 'int main(void) { return 0; }\n' >"$scratch/empty.c"
        # without the C library's headers any compiler fails
        if ! $cc -c "$scratch/empty.c" -o "$scratch/empty.o" 2>"$scratch/log" || echo "$why" | grep -q '\.h: No such file'; then
            echo "$why"
            return 1
        fi
        called=$($cc --version 2>/dev/null | head -n 1 | grep . || echo "$cc")
        echo "$called does not compile what is needed ($why);" \
            "gcc 9 and later do: install one, then run export CC=gcc-9 (or whatever it is called)"
        return 2
    fi
    $cc "$scratch/compiler.o" -o "$scratch/probe" ${LDFLAGS-} -lm 2>"$scratch/log" || { complaint; return 1; }
    attempt "$scratch/probe" || return 2
    $cc --version | head -n 1
}
probe_make() {
    needs make || return 1
    version make 's/^GNU Make //p' && return
    echo "$(command -v make) is not GNU make; install that one, and put it first in PATH under the name make"
    return 2
}
probe_cluster() {
    PATH=$PATH:/usr/sbin:/sbin
    for tool in ip unshare sshd ssh munged slurmctld slurmd srun; do needs $tool || return 1; done
    slurmd -V
}
probe_openmp()  { quietly run_c MACHINE -fopenmp && echo "specification of $($cc -fopenmp -dM -E - </dev/null | sed -n 's/.*_OPENMP //p')"; }
probe_onednn()  { run_c ONEDNN -ldnnl; }
probe_jansson() { run_c JANSSON -ljansson; }
probe_pcre2()   { run_c PCRE2 -lpcre2-8; }
probe_cmocka()  { quietly run_c CMOCKA -lcmocka && echo "runs a test"; }
# The first Python that can run the tests, as in the Makefile.
probe_pytest() {
    found="no $python"
    for of_tests in "$python" /usr/bin/python3; do
        if has "$of_tests" && found=$(attempt "$of_tests" -c '
try: import numpy, pytest, tomllib, xdist
except ImportError as e: raise SystemExit(print(e) or 1)
print(f"{pytest.__version__}, xdist {xdist.__version__}, numpy {numpy.__version__}")'); then echo "$found in $of_tests"; return; fi
    done
    echo "$found (in a Python of your own: pip install pytest pytest-xdist numpy)"
    return 1
}
# Emulated processors and some containers refuse what sanitizers ask of the kernel.
probe_sanitizer() {
    build "$cc" probe.c -DPROBE_SANITIZER -g -fsanitize=address,undefined || return 1
    attempt "$scratch/probe" || return 3
    "$scratch/probe" overrun 2>"$scratch/log" || true
    grep -q 'ERROR: AddressSanitizer' "$scratch/log" || { echo "they do not notice a read out of bounds"; return 3; }
    build "$cc" probe.c -DPROBE_SANITIZER -g -fsanitize=thread || return 1
    attempt "$scratch/probe" || return 3
    echo "for addresses, undefined behaviour and threads"
}
# Tests that run ip or chattr are skipped without them.
probe_tools() { needs pgrep && needs git && git --version; }
probe_fuzzer() {
    build "$clang" probe.c -DPROBE_FUZZER -fsanitize=fuzzer,address || return 1
    quietly attempt "$scratch/probe" -runs=1 || return 3
    echo "$clang $($clang -dumpversion) with libFuzzer"
}
probe_gnuplot() {
    needs gnuplot && attempt gnuplot -e "set terminal pngcairo; set output '$scratch/plot.png'; plot x" && [ -s "$scratch/plot.png" ] &&
        version gnuplot 's/gnuplot //p'
}
probe_curl() {
    echo fetched >"$scratch/page"
    needs curl && quietly attempt curl -fsS "file://$scratch/page" && version curl 's/^curl \([0-9.]*\).*/\1/p'
}
probe_ccache() { version ccache 's/^ccache version //p'; }
probe_python() {
    needs "$python" && attempt "$python" -c 'import sys
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 11): raise SystemExit(print(version, "is older than 3.11") or 1)
import venv, ensurepip
print(version)'
}
# Only its version: a page takes it seconds, and more on a machine that is busy.
probe_chromium() {
    for browser in chromium chromium-browser google-chrome; do
        if has $browser; then version $browser 's/^[A-Za-z ]* \([0-9.]*\).*/\1/p' && return; fi
    done
    needs chromium
}
probe_mpi() {
    build "${MPICC:-mpicc}" probe.c -DPROBE_MPI || return 1
    # Open MPI refuses root otherwise
    # shellcheck disable=SC2086 # a command and its options
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 attempt ${MPIRUN:-mpirun} --oversubscribe -np 2 "$scratch/probe" || return 2
}
probe_nvcc() { build "$nvcc" cuda.cu && echo "CUDA $("$scratch/probe" toolkit)"; }
probe_gpu() {
    if has "$nvcc"; then build "$nvcc" cuda.cu && attempt "$scratch/probe"; return; fi
    has nvidia-smi || { echo "no nvidia-smi, so no driver"; return 1; }
    attempt nvidia-smi --query-gpu=index,name,compute_cap,memory.total,driver_version --format=csv,noheader
}
# run_cuda NAME LIBRARY: builds that part of probe.c with the library that the Makefile would use, and runs it.
run_cuda() {
    needs "$nvcc" || return 1
    folder=$(sh "$here/find_cuda.sh" folder "$2" 2>/dev/null) || { echo "not found"; return 1; }
    eval "build \"\$nvcc\" probe.c \"-DPROBE_\$1\" $(sh "$here/find_cuda.sh" compile "$2") $(sh "$here/find_cuda.sh" link "$2")" || return 1
    found=$(attempt "$scratch/probe") && echo "$found in $folder" || { echo "$found"; return 1; }
}
probe_cublaslt() { run_cuda CUBLASLT cublasLt; }
probe_cudnn()    { run_cuda CUDNN cudnn; }
probe_nvrtc()    { run_cuda NVRTC nvrtc; }
probe_nccl()     { run_cuda NCCL nccl; }
