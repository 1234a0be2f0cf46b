#!/bin/sh
# compile.sh SOURCE.cu OUT [plain|asan|tsan] [g++ flags, objects, libraries...]
# Compiles CUDA C++ for the emulator: kernels run on the CPU. Needs g++, python3 and CUDA's headers; no nvcc, no GPU.
#   plain   barriers, warp functions, alignment, undefined behaviour, endless loops are checked
#   asan    also accesses out of bounds (AddressSanitizer), in global and in shared memory
#   tsan    also races between threads (ThreadSanitizer)
# OUT.o instead of a program's name: an object, to be linked by a later compile.sh or g++. OUT.so: a shared library.
# In the environment: EMULATOR_LIBRARIES="cublaslt cudnn", stand-ins to link; CPPFLAGS, where their headers are; EMULATOR_BUILD;
# EMULATOR_DEBUG=-g1, only line numbers: it compiles faster, but gdb knows no variables; WERROR=1, warnings are errors; ARCH, the
# processor to compile for. Where ccache is installed it keeps objects.
set -eu
[ $# -ge 2 ] || { sed -n '2,11s/^# //p' "$0" >&2; exit 2; }
source=$1 out=$2 build=${3:-plain}
[ $# -ge 3 ] && shift 3 || shift 2
here=$(dirname "$0")
quoted() { printf %s "$1" | sed 's|[^A-Za-z0-9_./=:,@%+~-]|\\&|g'; }

cuda=$(sh "$here/find_headers.sh")
ccache=$(command -v ccache) || ccache=
# Whole programs run in the plain build: unrolled loops have fewer branches to count. The others take longer to compile than to run.
case $build in
    plain) sanitize= define= optimise=-O2 unroll=8 ;;
    asan) sanitize=-fsanitize=address define=-DEMULATOR_ASAN optimise=-O1 unroll= ;;
    tsan) sanitize=-fsanitize=thread define=-DEMULATOR_TSAN optimise=-O1 unroll= ;;
    *) echo "compile.sh: the build must be plain, asan or tsan, not '$build'" >&2; exit 2 ;;
esac
[ "${WERROR:-0}" = 0 ] && werror= || werror=-Werror
case $(uname -m) in aarch64 | arm64) arch=-mcpu ;; *) arch=-march ;; esac
common="-std=c++17 -fPIC -ftls-model=initial-exec ${EMULATOR_DEBUG:--g} -Wall -Wextra $werror -Wno-unknown-pragmas -Wno-psabi -ffp-contract=off"
# Quoted, because the shell parses it again and a folder's name may contain a space.
common="$common -I$(quoted "$here")/include -I$(quoted "$here") -isystem $(quoted "$cuda")/include ${CPPFLAGS-}"
checks="$sanitize -fsanitize=undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fsanitize-coverage=trace-pc"

# The emulator's own parts, once per build, without instrumentation; made again when its sources are newer.
engine=${EMULATOR_BUILD:-build/emulator}/$build
mkdir -p "$engine" "$(dirname "$out")"
objects=
for part in engine warp hopper report memory streams runtime ${EMULATOR_LIBRARIES-}; do
    object=$engine/$part.o
    objects="$objects $object"
    for input in "$here"/*.cpp "$here"/*.h "$here/compile.sh"; do
        [ "$object" -nt "$input" ] && continue
        eval "$ccache g++ $common" '-O2 $define -c "$here/$part.cpp" -o "$object.$$"'
        mv "$object.$$" "$object"
        break
    done
done

# Preprocess, rewrite, compile, link: line markers keep the lines of every file, headers included. Kernels read floats as int4,
# which nvcc allows and C++ does not.
flags= before=
for flag; do
    case "$before $flag" in *-Xlinker*|" -l"*|" -L"*|" -Wl"*) ;; " -"*) flags="$flags $(quoted "$flag")" ;; esac
    [ "$flag" = -Xlinker ] && before=-Xlinker || before=
done
eval "g++ $common -O1 $flags" '-x c++ -include "$here/emulator.h" -ftrack-macro-expansion=0 -E "$source" -o "$out.in.ii" \
    -MMD -MP -MF "$out.d" -MT "$out"'
python3 "$here/launch.py" "$out.in.ii" $unroll > "$out.ii"
rm -f "$out.in.ii"
case $out in *.o) object=$out ;; *) object=$out.o ;; esac
eval "$ccache g++ $common $checks $optimise $arch=${ARCH:-native} -fno-strict-aliasing -fpreprocessed $flags" '-c "$out.ii" -o "$object"'
[ "$object" = "$out" ] && exit
case $out in *.so) shared=-shared ;; *) shared= ;; esac
g++ $checks $shared "$object" "$@" $objects -pthread -o "$out"
rm -f "$object"
