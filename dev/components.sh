# components.sh - what this project needs, and how to find out whether a machine has it. Sourced by setup.sh and
# doctor.sh, which set `here` to dev/; make_scratch sets `scratch` to a temporary folder.
#
# No package manager is asked: a component is present if a program that uses it compiles, links and runs. pkg-config would
# not do: it knows neither oneDNN nor MPI, and a bare system lacks it. CC, CPPFLAGS, LDFLAGS, CLANG, NVCC, MPICC, MPIRUN
# and PYTHON say what to use, as in the Makefile.

# One line per component: key | name | who needs it | what it is for | Debian's packages
#   demo              make demo and make test need it
#   test              make test needs it
#   more              something does not work without it, as the fourth column says; setup.sh installs it all the same
#   chromium cluster  the same, but only setup.sh --with-chromium or --with-cluster installs it
#   cuda              libraries of the GPU build, which setup.sh --with-cuda installs from pip
#   gpu               the GPU build; nothing here installs it, and the fifth column says where it comes from
# A new component is a line here and a function probe_KEY below, which prints the version, or the error. Its status is 0
# if the component works, 1 if it does not, and 3 if it cannot run on this machine and everything else works without it.
# A key without a function is a program, which is asked for its version.
components() {
    sed 's/ *| */|/g' <<'END'
compiler  | C compiler    | demo     | building everything                       | gcc libc6-dev
make      | GNU make      | demo     | building everything                       | make
onednn    | oneDNN        | demo     | matrix products on the CPU                | libdnnl-dev
jansson   | Jansson       | demo     | checkpoints and tokenizers (JSON)         | libjansson-dev
pcre2     | PCRE2         | demo     | GPT-2's tokenizer                         | libpcre2-dev
mpi       | Open MPI      | demo     | runs of more than one rank                | libopenmpi-dev openmpi-bin
cmocka    | cmocka        | test     | make test                                 | libcmocka-dev
pytest    | pytest        | test     | make test | python3-pytest python3-pytest-xdist python3-numpy
tools     | pgrep, git    | test     | make test                                 | procps git iproute2 e2fsprogs
sanitizer | sanitizers    | test     | make test, DEBUG=1                        | gcc
fuzzer    | fuzzer        | more     | make fuzz, and fuzzing in make test-all   | clang libclang-rt-dev
gnuplot   | gnuplot       | more     | the plots of make demo                    | gnuplot-nox
curl      | curl          | more     | the download scripts under dev/data       | curl ca-certificates
ccache    | ccache        | more     | faster recompilation                      | ccache
python    | Python + venv | more     | make lab, bench, site, and tables of make demo | python3 python3-venv
chromium  | Chromium      | chromium | testing the pages of make site            | chromium
cluster   | sshd, Slurm   | cluster  | make cluster | openssh-server openssh-client slurmctld slurmd slurm-client munge
nvcc      | CUDA toolkit  | gpu      | the GPU build                             | developer.nvidia.com/cuda-downloads
gpu       | GPU           | gpu      | running the GPU build                     | NVIDIA's driver
cublaslt  | cuBLASLt      | cuda     | matrix products on the GPU                | nvidia-cublas
cudnn     | cuDNN         | cuda     | the fastest attention on the GPU          | nvidia-cudnn-cu13
nvrtc     | NVRTC         | cuda     | cuDNN, which compiles its kernels with it | nvidia-cuda-nvrtc
nccl      | NCCL          | cuda     | several GPUs                              | nvidia-nccl-cu13
END
}

clone=$(cd "$here/.." && pwd)
# The Makefile's default.
case $(uname -m) in aarch64 | arm64) for_arch=-mcpu=native ;; *) for_arch=-march=native ;; esac
cc=${CC:-cc} nvcc=${NVCC:-nvcc} clang=${CLANG:-clang} python=${PYTHON:-python3}
. "$here/on_ranks.sh"

has() { command -v "$1" >/dev/null 2>&1; }
needs() { has "$1" || { echo "no $1"; return 1; }; } # PROGRAM: the same, with a message

# examine WHO...: probes every component that one of these needs, and prints "STATUS|SAID|" and its line of the table.
examine() {
    components | while IFS='|' read -r key name who rest; do
        case " $* " in *" $who "*) ;; *) continue ;; esac
        said=$(if has "probe_$key"; then "probe_$key"; else version "$key"; fi 2>/dev/null </dev/null)
        status=$? said=$(echo "$said" | tr '|' ' ' | awk '{ printf "%s%s", (NR > 1 ? "; " : ""), $0 }')
        echo "$status|$said|$key|$name|$who|$rest"
    done
}

# Sets scratch to a folder for the programs that probes build.
make_scratch() {
    scratch=$(mktemp -d) || exit 1
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 1' HUP INT TERM
}

# The most informative line that a compiler, linker or loader printed.
complaint() {
    { grep -m 1 -E 'error|cannot|not found|undefined' "$scratch/log" || grep -m 1 '[a-z]' "$scratch/log" ||
        echo "it failed and printed nothing"; } |
        sed -e 's/.*error: //' -e 's/^.*ld: //' -e 's/^==[0-9]*==//' | cut -c 1-150
}
# attempt COMMAND...: prints its output, or why it failed. A command that hangs has failed.
attempt() {
    if has timeout; then set -- timeout 30 "$@"; fi
    if "$@" >"$scratch/out" 2>"$scratch/log"; then cat "$scratch/out"; return; fi
    grep . "$scratch/out" || complaint
    return 1
}
# build SUFFIX COMPILER FLAGS...: compiles and links the source on stdin into $scratch/probe, or prints why not.
# shellcheck disable=SC2086 # compilers and flags are lists of words
build() {
    source=$scratch/probe.$1 compiler=$2
    shift 2
    cat >"$source"
    needs "${compiler%% *}" || return 1
    $compiler ${CPPFLAGS-} "$source" -o "$scratch/probe" ${LDFLAGS-} "$@" >"$scratch/log" 2>&1 && return
    complaint
    return 1
}
main_of() { printf '#include <stdio.h>\n#include <%s>\nint main(void) { %s; return 0; }\n' "$@"; } # HEADER STATEMENTS
# run_c HEADER STATEMENTS FLAGS...: builds that program, and runs it.
run_c() {
    header=$1 statements=$2
    shift 2
    main_of "$header" "$statements" | build c "$cc" "$@" && attempt "$scratch/probe"
}
# version PROGRAM: the first number in what it says of itself.
version() { needs "$1" && attempt "$1" --version | sed -n '1s/^[^0-9]*\([0-9.]*[0-9]\).*/\1/p' | grep .; }

# With the Makefile's flags, what llmc/ uses and old compilers lack: overflow checks (gcc 5), vector loops (gcc 4.9).
probe_compiler() {
    needs "${cc%% *}" || return 1
    run_c omp.h 'float x[4] = { 1, 4, 2, 3 }, max = 0; size_t product;
        _Pragma("omp simd reduction(max:max)") for (int i = 0; i < 4; i++) max = x[i] > max ? x[i] : max;
        if (max > 4 || !__builtin_mul_overflow((size_t)-1, (size_t)omp_get_max_threads() + 1, &product)) return 1' \
        -std=c11 -O3 $for_arch -ffp-contract=off -fno-math-errno -fopenmp && { $cc --version | head -n 1; return; }
    case $($cc --version 2>/dev/null) in
        *clang*) echo "clang also needs libomp-dev" ;;
        *) echo "$($cc --version 2>/dev/null | head -n 1): gcc 9 and later will do" ;;
    esac
    return 1
}
probe_make() {
    needs make || return 1
    case $(make --version 2>/dev/null) in GNU*) version make; return ;; esac
    echo "$(command -v make) is not GNU make"
    return 1
}
probe_onednn() {
    run_c oneapi/dnnl/dnnl.h 'const dnnl_version_t* v = dnnl_version(); printf("%d.%d.%d\n", v->major, v->minor, v->patch)' -ldnnl
}
probe_jansson() { run_c jansson.h 'puts(jansson_version_str())' -ljansson; }
probe_pcre2() {
    run_c pcre2.h 'char version[64]; pcre2_config(PCRE2_CONFIG_VERSION, version); puts(version)' \
        -DPCRE2_CODE_UNIT_WIDTH=8 -lpcre2-8
}
# It has no function for its version.
probe_cmocka() {
    run_c cmocka.h 'assert_int_equal(1 + 1, 2); puts("its assertions work")' \
        -include stdarg.h -include stddef.h -include stdint.h -include setjmp.h -lcmocka
}
# As many ranks as make demo starts, and in the same way.
probe_mpi() {
    main_of mpi.h 'int rank, sum = 0, one = 1, length; char version[MPI_MAX_LIBRARY_VERSION_STRING];
        MPI_Init(NULL, NULL); MPI_Comm_rank(MPI_COMM_WORLD, &rank); MPI_Get_library_version(version, &length);
        MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        if (rank == 0) printf("%.*s, %d ranks reach each other\n", (int)strcspn(version, ",\n"), version, sum);
        MPI_Finalize(); if (sum != 4) return 1' | build c "${MPICC:-mpicc}" -include string.h || return 1
    ranks_launcher 4
    # shellcheck disable=SC2086 # a command and its options
    attempt $launcher -np 4 "$scratch/probe" && return
    echo "$launcher does not start 4 ranks; MPIRUN may name another launcher"
    return 1
}
# The first Python that can run the tests, as in the Makefile.
probe_pytest() {
    found="no $python"
    for of_tests in "$python" /usr/bin/python3; do
        has "$of_tests" || continue
        found=$(attempt "$of_tests" -c 'try: import numpy, pytest, tomllib, xdist
except ImportError as e: raise SystemExit(print(e) or 1)
print(f"{pytest.__version__}, xdist {xdist.__version__}, numpy {numpy.__version__}")') || continue
        echo "$found in $of_tests"
        return
    done
    echo "$found (in a Python of your own: pip install pytest pytest-xdist numpy)"
    return 1
}
# Tests that run ip or chattr are skipped without them.
probe_tools() { needs pgrep && needs git && version git; }
# Emulated processors and some containers refuse what sanitizers ask of the kernel. The last program reads past the end
# of its memory.
probe_sanitizer() {
    for flags in address,undefined thread; do
        main_of stdlib.h 'free(calloc(8, 1))' | build c "$cc" -g -fsanitize=$flags || return 1
        attempt "$scratch/probe" || return 3
    done
    main_of stdlib.h 'volatile char* p = calloc(8, 1); volatile int i = 8; if (p[i]) return 1' |
        build c "$cc" -g -fsanitize=address || return 1
    if "$scratch/probe" 2>"$scratch/log" || ! grep -q 'ERROR: AddressSanitizer' "$scratch/log"; then
        echo "they do not notice a read out of bounds"
        return 3
    fi
    echo "for addresses, undefined behaviour and threads"
}
probe_fuzzer() {
    echo '#include <stdint.h>
        #include <stddef.h>
        int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { (void)data; (void)size; return 0; }' |
        build c "$clang" -fsanitize=fuzzer,address || return 1
    attempt "$scratch/probe" -runs=1 || return 3
    version "$clang"
}
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
        if has $browser; then version $browser && return; fi
    done
    needs chromium
}
probe_cluster() {
    PATH=$PATH:/usr/sbin:/sbin
    for tool in ip unshare sshd ssh munged slurmctld slurmd srun; do needs $tool || return 1; done
    slurmd -V
}
# The toolkit's version, with an argument; otherwise each GPU, after a kernel has run there.
build_cuda() {
    build cu "$nvcc" <<'END'
#include <cstdio>
__global__ void answer(int* out) { *out = 42; }
int main(int argc, char**) {
    int version = 0, devices = 0, failed = 0;
    cudaRuntimeGetVersion(&version);
    if (argc > 1) return printf("%d.%d\n", version / 1000, version % 1000 / 10) < 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess) return printf("%s\n", cudaGetErrorString(error));
    for (int i = 0; i < devices; i++) {
        cudaDeviceProp p;
        int *out, result = 0;
        cudaGetDeviceProperties(&p, i);
        cudaSetDevice(i);
        if (cudaMalloc(&out, sizeof *out) == cudaSuccess) answer<<<1, 1>>>(out);
        cudaMemcpy(&result, out, sizeof result, cudaMemcpyDeviceToHost);
        failed += result != 42;
        printf("%d: %s, compute capability %d.%d, %.0f GB%s%s\n", i, p.name, p.major, p.minor,
               (double)p.totalGlobalMem * 1e-9, 10 * p.major + p.minor < 75 ? ", too old: the minimum is 7.5" : "",
               result == 42 ? "" : ", a kernel does not run on it");
    }
    return devices == 0 || failed != 0;
}
END
}
probe_nvcc() { build_cuda && attempt "$scratch/probe" toolkit; }
probe_gpu() {
    needs nvidia-smi || return 1
    if has "$nvcc"; then build_cuda && attempt "$scratch/probe"; else attempt nvidia-smi -L; fi
}
# run_cuda LIBRARY STATEMENTS: builds that program with the library that the Makefile would use, and runs it.
run_cuda() {
    needs "$nvcc" || return 1
    folder=$(sh "$here/find_cuda.sh" folder "$1" 2>/dev/null) || { echo "not found"; return 1; }
    main_of "$1.h" "$2" >"$scratch/main.c"
    flags="$(sh "$here/find_cuda.sh" compile "$1") $(sh "$here/find_cuda.sh" link "$1")" # quoted for the shell
    eval "build c \"\$nvcc\" $flags" <"$scratch/main.c" && attempt "$scratch/probe" && echo " in $folder"
}
probe_cublaslt() { run_cuda cublasLt 'printf("%zu", cublasLtGetVersion())'; }
probe_cudnn()    { run_cuda cudnn 'printf("%zu", cudnnGetVersion())'; }
probe_nvrtc()    { run_cuda nvrtc 'int v, w; if (nvrtcVersion(&v, &w)) return 1; printf("%d.%d", v, w)'; }
probe_nccl()     { run_cuda nccl 'int v; if (ncclGetVersion(&v)) return 1; printf("%d", v)'; }
