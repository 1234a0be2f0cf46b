#!/bin/sh
# find_cuda.sh WHAT LIBRARY... - prints where NVIDIA's libraries are, as flags that nvcc and g++ both understand, quoted for the shell
# if a folder's name contains a space. Folders inside the current one are printed relative to it, except for run-time paths. WHAT is
#   compile   include folders
#   link      the libraries, and where the program will look for them when it starts
#   rpath     only where to look, for libraries that a program opens at run time
#   folder    the folder's name, for people to read
# LIBRARY is cublasLt, cudnn, nvrtc or nccl. If one is missing, stderr names it and says how to get it; the status is then 1.
#
# The first place that has both header and library counts: the compiler's own folders (Debian's and Ubuntu's packages, and
# whatever CPPFLAGS and LDFLAGS name); the CUDA Toolkit of nvcc, or CUDA_HOME; nvidia/ beside this folder, which dev/setup.sh
# fills; the packages of the active Python. The last two hold pip's wheels, each for one CUDA version, which must be the
# toolkit's. Wheels have no libX.so, only libX.so.N, so the flags name that file.
set -u
here=$(dirname -- "$0")
root=$(cd "$here/.." && pwd)
[ $# -ge 2 ] || { sed -n '2,8s/^# //p' "$0" >&2; exit 2; }
what=$1
shift

# Prints the toolkit's folder, as nvcc reports it.
toolkit_home() {
    if [ -n "${CUDA_HOME:-}" ]; then echo "$CUDA_HOME"; return; fi
    ${NVCC:-nvcc} --dryrun x.cu 2>&1 | sed -n 's/^#\$ TOP=//p' | grep . || echo /usr/local/cuda
}
home=$(toolkit_home)
# The toolkit's major version, "13"; empty if there is no toolkit.
major=$(for folder in "$home" /usr; do sed -n 's/^#define CUDA_VERSION *\([0-9]*\)[0-9][0-9][0-9]$/\1/p' "$folder/include/cuda.h"; done 2>/dev/null |
    head -n 1)

# Lists of folders are split at line ends only, because a folder's name may contain a space.
line_end="
"
# Prints the folders into which wheels were unpacked, if their cuBLASLt is of the toolkit's version.
collections() (
    IFS=$line_end
    # only the Python's own folders, not the current one
    of_python=$("${PYTHON:-python3}" -c 'import sys; del sys.path[0]; import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null)
    for folder in "$root/nvidia" $of_python; do
        # shellcheck disable=SC2086 # without a toolkit, any version is accepted
        for lt in "$folder"/*/lib/libcublasLt.so.${major:-*}; do if [ -e "$lt" ]; then echo "$folder"; break; fi; done
    done
)
places() (
    IFS=$line_end
    echo "$home"
    for folder in $(collections); do for place in "$folder"/*; do echo "$place"; done; done
)

# Succeeds if the compiler finds header and library without any flags from this script.
is_installed() {
    # shellcheck disable=SC2086 # lists of words
    echo "#include <$2>" | ${CC:-cc} ${CPPFLAGS-} -E -x c - >/dev/null 2>&1 &&
        ${CC:-cc} -shared -x c /dev/null -o /dev/null ${LDFLAGS-} "-l$1" 2>/dev/null
}
library_in() { # PLACE LIBRARY: prints the library's file
    for file in "$1"/lib64/"lib$2.so" "$1"/lib/"lib$2.so" "$1"/lib64/"lib$2.so".* "$1"/lib/"lib$2.so".*; do
        if [ -e "$file" ]; then echo "$file"; return; fi
    done
    return 1
}

# An old-style rpath also applies to what the libraries open at run time: cuDNN opens NVRTC, and NVRTC its built-in functions.
say() { # FOLDER-OF-HEADERS LIBRARY-FILE
    folder=$(dirname "$2") rpath="-Xlinker --disable-new-dtags -Xlinker -rpath -Xlinker"
    case $what in
        compile) printf '%s\n' "-isystem $(quoted "${1#"$PWD/"}")" ;;
        link) printf '%s\n' "-L$(quoted "${folder#"$PWD/"}") $rpath $(quoted "$folder") -Xlinker -l:${2##*/}" ;;
        rpath) printf '%s\n' "$rpath $(quoted "$folder")" ;;
        folder) echo "$folder" ;;
    esac
}
quoted() { printf %s "$1" | sed 's|[^A-Za-z0-9_./=:,@%+~-]|\\&|g'; }
find_library() { # LIBRARY HEADER
    if is_installed "$1" "$2"; then
        case $what in link) echo "-l$1" ;; folder) echo "the system's folders" ;; esac
        return
    fi
    places >"$list"
    while read -r place; do
        if [ -e "$place/include/$2" ] && file=$(library_in "$place" "$1"); then say "$place/include" "$file"; return; fi
    done <"$list"
    return 1
}

list=$(mktemp) || exit 1
trap 'rm -f "$list"' EXIT
status=0
for library in "$@"; do
    case $library in
        cublasLt) header=cublasLt.h name=cuBLAS wheel="nvidia-cublas" ;;
        cudnn) header=cudnn.h name=cuDNN wheel="nvidia-cudnn-cu${major:-13}" ;;
        nvrtc) header=nvrtc.h name=NVRTC wheel="nvidia-cuda-nvrtc" ;;
        nccl) header=nccl.h name=NCCL wheel="nvidia-nccl-cu${major:-13}" ;;
        *) echo "find_cuda.sh: the library must be cublasLt, cudnn, nvrtc or nccl, not '$library'" >&2; exit 2 ;;
    esac
    find_library "$library" "$header" && continue
    echo "$name${major:+ for CUDA $major} is missing: $header and lib$library.so were not found together. Get it with" \
        "sh dev/setup.sh --with-cuda (about 1 GB, into nvidia/), with pip install $wheel, or from NVIDIA's packages" >&2
    status=1
done
exit $status
