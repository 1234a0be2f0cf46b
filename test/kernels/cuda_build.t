#!/bin/bash
# make DEVICE=cuda where something is missing: what it says, and that it says so before the compiler does. Also what its programs
# say where there is no GPU to run them.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
echo '#include <cublasLt.h>' | "${CC:-cc}" -E -x c - > /dev/null 2>&1 && { echo "1..0 # SKIP cuBLAS is installed system-wide, and cannot be missing"; exit 0; }

# A copy without nvidia/, and a toolkit with nothing but its version.
mkdir -p "$work/copy/dev" "$work/toolkit/include" "$work/wheels/cu13/include" "$work/wheels/cu13/lib"
cp Makefile "$work/copy"
cp dev/find_cuda.sh "$work/copy/dev"
echo '#define CUDA_VERSION 13000' > "$work/toolkit/include/cuda.h"
copy() { env -u MAKEFLAGS CUDA_HOME="$work/toolkit" PYTHON=no-such-python CC="${CC:-cc}" LDFLAGS="${LDFLAGS:-}" "$@"; }
asked() { # STATUS COMMAND...
    local expected=$1 status
    shift
    copy "$@" > "$work/said" 2>&1
    status=$?
    cat "$work/said"
    [ "$status" -eq "$expected" ]
}
says() { grep -qe "$1" "$work/said" || { echo "it did not say '$1'"; return 1; }; }
make_copy() { asked "$1" make --no-print-directory -C "$work/copy" "${@:2}"; }
find_copy() { asked "$1" sh "$work/copy/dev/find_cuda.sh" "${@:2}"; }
fill() { # PLACE MAJOR: makes a place that has cuBLAS and cuDNN
    mkdir -p "$1/include" "$1/lib"
    touch "$1/include/cublasLt.h" "$1/lib/libcublasLt.so.$2" "$1/include/cudnn.h" "$1/lib/libcudnn.so.9"
}

missing_libraries_are_told() {
    make_copy 2 DEVICE=cuda find-libraries && says '^cuBLAS for CUDA 13 is missing: .*sh dev/setup.sh' && says '^cuDNN for CUDA 13 is missing' &&
        says 'pip install nvidia-cudnn-cu13' && says 'make DEVICE=cpu'
}
cudnn_can_be_left_out() { make_copy 2 DEVICE=cuda USE_CUDNN=0 find-libraries && says '^cuBLAS' && not says '^cuDNN'; }
wheels_are_found() {
    fill "$work/copy/nvidia/cu13" 13
    make_copy 0 DEVICE=cuda find-libraries && find_copy 0 link cublasLt && says "-L$work/copy/nvidia/cu13/lib .*-l:libcublasLt.so.13" &&
        says "-rpath -Xlinker $work/copy/nvidia/cu13/lib" && find_copy 0 compile cudnn && says "-isystem $work/copy/nvidia/cu13/include"
}
wheels_of_another_version_are_not() {
    rm -r "$work/copy/nvidia"
    fill "$work/copy/nvidia/cublas" 12
    make_copy 2 DEVICE=cuda find-libraries && says '^cuBLAS for CUDA 13 is missing'
}
the_toolkit_comes_first() {
    touch "$work/toolkit/include/cublasLt.h"
    mkdir -p "$work/toolkit/lib64"
    touch "$work/toolkit/lib64/libcublasLt.so" "$work/toolkit/lib64/libcublasLt.so.13"
    find_copy 0 link cublasLt && says "-L$work/toolkit/lib64 .*-l:libcublasLt.so$"
}
# --cpu-offload's AdamW is the CPU's: every flag that decides what code it becomes must reach the compiler behind nvcc.
host_code_is_the_cpus() {
    touch "$work/copy/train_gpt2_single.cu"
    make_copy 0 -n DEVICE=cpu build/train_gpt2_single || return 1
    local flag flags=$(grep -oE -- ' -(O3|fopenmp|m[a-z]+=[a-z]+|f[a-z-]+=[a-z]+|fno-[a-z-]+)' "$work/said" | sort -u)
    make_copy 0 -n DEVICE=cuda USE_CUDNN=0 build/cuda-nocudnn/train_gpt2_single || return 1
    [ "$(echo "$flags" | wc -w)" -ge 5 ] || { echo "the CPU's compiler is given only" $flags; return 1; }
    for flag in $flags; do
        [ "$flag" = -O3 ] || says "-Xcompiler [^ ]*$flag[, ]" || return 1
    done
}
unknown_devices_are_told() { make_copy 2 DEVICE=gpu && says "DEVICE must be cpu, cuda or emulated, not 'gpu'"; }
hosts_compiler_can_be_chosen() {
    touch "$work/copy/train_gpt2_single.cu"
    make_copy 0 -n DEVICE=cuda HOST_CXX=clang++ build/cuda-clang++/train_gpt2_single.o && says '-ccbin clang++ .* -c train_gpt2_single.cu'
}
# An Open MPI that asks for the new style of rpath, which would not apply to the libraries that cuDNN opens at run time.
rpath_stays_old() {
    mkdir -p "$work/bin"
    printf '#!/bin/sh\ncase $1 in *link) echo -L/mpi -Wl,-rpath -Wl,/mpi -Wl,--enable-new-dtags -lmpi ;; esac\n' > "$work/bin/mpicc"
    chmod +x "$work/bin/mpicc"
    touch "$work/copy/train_gpt2_ddp.cu"
    PATH=$work/bin:$PATH make_copy 0 -n DEVICE=cuda build/cuda/train_gpt2_ddp &&
        says '-Xlinker -rpath -Xlinker /mpi  *-lmpi' && not says 'enable-new-dtags' > /dev/null
}
no_driver() { fails_with "no NVIDIA driver is loaded" "make DEVICE=cpu" -- "$1" --steps 1; }

check "libraries that are missing are named, with the ways to get them" missing_libraries_are_told
check "cuDNN can be left out" cudnn_can_be_left_out
check "pip's wheels in nvidia/ are found" wheels_are_found
check "wheels of another CUDA version than the toolkit's are not" wheels_of_another_version_are_not
check "the toolkit's own library comes first" the_toolkit_comes_first
check "the host's code is compiled as the CPU's programs are" host_code_is_the_cpus
check "an unknown device is an error" unknown_devices_are_told
check "another compiler of the host's code can be chosen" hosts_compiler_can_be_chosen
check "Open MPI's flags leave the rpath as cuDNN needs it" rpath_stays_old
for program in build/cuda*/train_gpt2_single; do
    name="without a driver $program says so"
    if [ ! -x "$program" ]; then skip "$name" "make DEVICE=cuda has not been run"
    elif nvidia-smi -L > /dev/null 2>&1; then skip "$name" "there is a driver"
    else check "$name" no_driver "$program"; fi
done
done_testing
