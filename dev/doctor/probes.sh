# probes.sh - what this project needs, and how to find out whether a machine has it. Sourced by setup.sh and doctor.sh,
# which set `probes` to this folder and `scratch` to a temporary one.
#
# No package manager is asked: a library is here if a program that uses it compiles, links, runs and gets the right
# answer. CC, CPPFLAGS, LDFLAGS, CLANG, NVCC, MPICC, MPIRUN and PYTHON say what to use, as in the Makefile.

# One line a component: key | name | class | what it is for | packages of apt | of dnf | of pacman | of brew
#   required  without it the CPU programs or their tests cannot be built
#   optional  without it something is lost, and the fourth column says what; setup.sh installs it all the same
#   extra     only doctor.sh speaks of it; the fifth column says how to get it
# A new component is a line here and a function probe_KEY below.
components() {
    sed -e 's/ *| */|/g' <<'END'
compiler  | C compiler    | required | building everything                               | gcc libc6-dev   | gcc               | gcc     | gcc
make      | make          | required | building everything                               | make            | make              | make    | make
openmp    | OpenMP        | required | using more than one core                          | gcc             | libgomp           | gcc     | libomp
onednn    | oneDNN        | required | matrix products on the CPU                        | libdnnl-dev     | onednn-devel      | onednn  | onednn
jansson   | Jansson       | required | checkpoints and tokenizers (JSON)                 | libjansson-dev  | jansson-devel     | jansson | jansson
pcre2     | PCRE2         | required | GPT-2's tokenizer                                 | libpcre2-dev    | pcre2-devel       | pcre2   | pcre2
cmocka    | cmocka        | required | make test                                         | libcmocka-dev   | libcmocka-devel   | cmocka  | cmocka
mpi       | Open MPI      | required | runs of more than one rank                        | libopenmpi-dev openmpi-bin | openmpi-devel | openmpi | open-mpi
prove     | prove         | required | make test                                         | perl            | perl-Test-Harness | perl    | perl
sanitizer | sanitizers    | required | make test, DEBUG=1                                | gcc             | libasan libubsan  | gcc     | gcc
fuzzer    | fuzzer        | optional | make fuzz, and the fuzzing part of make test      | clang libclang-rt-dev | clang compiler-rt | clang compiler-rt | llvm
gnuplot   | gnuplot       | optional | the plots of make demo                            | gnuplot-nox     | gnuplot-minimal   | gnuplot | gnuplot
curl      | curl          | optional | the download scripts under dev/data, and their test | curl ca-certificates | curl           | curl    | curl
python    | Python + venv | optional | make test-interop; training and tests need none   | python3 python3-venv | python3      | python  | python
nvcc      | CUDA toolkit  | extra    | the GPU build                                     | NVIDIA's CUDA Toolkit (developer.nvidia.com/cuda-downloads)
gpu       | GPU           | extra    | running the GPU build                             | an NVIDIA GPU, and its driver
cublaslt  | cuBLASLt      | extra    | matrix products on the GPU                        | sh dev/setup.sh; or pip install nvidia-cublas; it is part of the CUDA Toolkit
cudnn     | cuDNN         | extra    | the fastest attention on the GPU                  | sh dev/setup.sh; or pip install nvidia-cudnn-cu13; or NVIDIA's package repository
nvrtc     | NVRTC         | extra    | cuDNN, which compiles its kernels with it         | sh dev/setup.sh; or pip install nvidia-cuda-nvrtc; it is part of the CUDA Toolkit
nccl      | NCCL          | extra    | several GPUs                                      | sh dev/setup.sh; or pip install nvidia-nccl-cu13; or NVIDIA's package repository
END
}

has() { command -v "$1" >/dev/null 2>&1; }

# The line of a compiler's, linker's or loader's complaint that says most.
complaint() {
    grep -m 1 -E 'error|cannot|not found|undefined' "$scratch/log" | sed -e 's/.*error: //' -e 's/^.*ld: //' | cut -c 1-150 | grep . ||
        head -n 1 "$scratch/log" | cut -c 1-150 | grep . || echo "it failed without a word"
}

# attempt COMMAND...: what it prints, or its complaint. A probe that hangs is one that fails.
attempt() {
    if has timeout; then set -- timeout 30 "$@"; fi
    if "$@" >"$scratch/out" 2>"$scratch/log"; then cat "$scratch/out"; return; fi
    if [ -s "$scratch/out" ]; then cat "$scratch/out"; else complaint; fi
    return 1
}

# build_probe COMPILER SOURCE FLAGS...: compiles and links one of the programs beside this file into $scratch/probe.
build_probe() {
    compiler=$1 source=$2
    shift 2
    has "${compiler%% *}" || { echo "no ${compiler%% *}"; return 1; }
    # shellcheck disable=SC2086 # compilers and flags are lists of words
    $compiler ${CPPFLAGS-} "$probes/$source" -o "$scratch/probe" ${LDFLAGS-} "$@" >"$scratch/log" 2>&1 || { complaint; return 1; }
}
# run_c SOURCE FLAGS...: the same with the C compiler, and runs it.
run_c() { build_probe "${CC:-cc}" "$@" && attempt "$scratch/probe"; }
# quietly COMMAND...: of what it prints only the first line, and only if it fails.
quietly() { "$@" >"$scratch/said" || { head -n 1 "$scratch/said"; return 1; }; }

probe_compiler() {
    has "${CC:-cc}" || { echo "no ${CC:-cc}"; return 1; }
    echo 'int main(void) { return 0; }' >"$scratch/empty.c"
    ${CC:-cc} -std=c11 "$scratch/empty.c" -o "$scratch/probe" -lm 2>"$scratch/log" || { complaint; return 1; }
    "$scratch/probe" && ${CC:-cc} --version | head -n 1
}
probe_make() {
    has make || { echo "no make"; return 1; }
    make --version | sed -n 's/^GNU Make //p' | grep . || { echo "this make is not GNU Make"; return 1; }
}
probe_openmp()  { quietly run_c machine.c -fopenmp && echo "specification of $(${CC:-cc} -fopenmp -dM -E - </dev/null | sed -n 's/.*_OPENMP //p')"; }
probe_onednn()  { run_c onednn.c -ldnnl; }
probe_jansson() { run_c jansson.c -ljansson; }
probe_pcre2()   { run_c pcre2.c -lpcre2-8; }
probe_cmocka()  { quietly run_c cmocka.c -lcmocka && echo "runs a test"; }
probe_prove() {
    has prove || { echo "no prove"; return 1; }
    printf 'echo 1..1\necho ok 1\n' >"$scratch/one.t"
    quietly attempt prove -e sh "$scratch/one.t" && prove --version | sed -n 's/.*Harness v\([0-9.]*\).*/\1/p'
}
probe_sanitizer() {
    run_c sanitizer.c -g -fsanitize=address,undefined || return 1
    "$scratch/probe" overrun 2>"$scratch/log" || true
    grep -q 'ERROR: AddressSanitizer' "$scratch/log" || { echo "they do not notice a read out of bounds"; return 1; }
    echo "address and undefined behaviour"
}
probe_fuzzer() {
    build_probe "${CLANG:-clang}" fuzzer.c -fsanitize=fuzzer,address && quietly attempt "$scratch/probe" -runs=1 &&
        echo "${CLANG:-clang} $(${CLANG:-clang} -dumpversion) with libFuzzer"
}
probe_gnuplot() {
    has gnuplot || { echo "no gnuplot"; return 1; }
    attempt gnuplot -e "set terminal pngcairo; set output '$scratch/plot.png'; plot x" || return 1
    [ -s "$scratch/plot.png" ] && gnuplot --version | sed 's/gnuplot //'
}
probe_curl() {
    has curl || { echo "no curl"; return 1; }
    echo fetched >"$scratch/page"
    quietly attempt curl -fsS "file://$scratch/page" && curl --version | sed -n 's/^curl \([0-9.]*\).*/\1/p'
}
probe_python() {
    has "${PYTHON:-python3}" || { echo "no ${PYTHON:-python3}"; return 1; }
    attempt "${PYTHON:-python3}" -c 'import sys, venv, ensurepip; print(".".join(map(str, sys.version_info[:3])))'
}

probe_mpi() {
    build_probe "${MPICC:-mpicc}" mpi.c || return 1
    # Open MPI refuses root otherwise
    # shellcheck disable=SC2086 # a command and its options
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 attempt ${MPIRUN:-mpirun} --oversubscribe -np 2 "$scratch/probe"
}
probe_nvcc() { build_probe "${NVCC:-nvcc}" cuda.cu && echo "CUDA $("$scratch/probe" toolkit)"; }
probe_gpu() {
    if has "${NVCC:-nvcc}"; then build_probe "${NVCC:-nvcc}" cuda.cu && attempt "$scratch/probe"; return; fi
    has nvidia-smi || { echo "no nvidia-smi, so no driver"; return 1; }
    attempt nvidia-smi --query-gpu=index,name,compute_cap,memory.total,driver_version --format=csv,noheader
}
probe_cublaslt() { run_cuda cublaslt.c cublasLt; }
probe_cudnn()    { run_cuda cudnn.c cudnn; }
probe_nvrtc()    { run_cuda nvrtc.c nvrtc; }
probe_nccl()     { run_cuda nccl.c nccl; }

# run_cuda SOURCE LIBRARY: builds it with the library from where the Makefile would take it, and runs it.
run_cuda() {
    has "${NVCC:-nvcc}" || { echo "no ${NVCC:-nvcc}"; return 1; }
    found=$(sh "$probes/../find_cuda.sh" folder "$2" 2>/dev/null) || { echo "not found"; return 1; }
    # shellcheck disable=SC2046 # lists of flags
    build_probe "${NVCC:-nvcc}" "$1" $(sh "$probes/../find_cuda.sh" compile "$2") $(sh "$probes/../find_cuda.sh" link "$2") || return 1
    version=$(attempt "$scratch/probe") && echo "$version in $found" || { echo "$version"; return 1; }
}
