#!/bin/bash
# Gives the descriptors of our matrix products to the real cuBLASLt where it is installed. Checking them takes no GPU; the
# kernels around them are compiled for the emulator and never run.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
link=$(sh dev/find_cuda.sh link cublasLt 2> /dev/null) || { echo "1..0 # SKIP cuBLAS is not here (sh dev/setup.sh fetches it where nvcc is)"; exit 0; }
export EMULATOR_BUILD=build/emulator CPPFLAGS
CPPFLAGS=$(sh dev/find_cuda.sh compile cublasLt)

accepted() {
    local precision=$1
    sh dev/emulator/compile.sh test/unit/test_cublaslt_descriptors.cu "$work/$precision" plain -DPRECISION_"${precision^^}" $link && "$work/$precision"
}
for precision in fp32 bf16 fp16; do
    check "cuBLASLt accepts the descriptors of all products in $precision" accepted $precision
done
done_testing
