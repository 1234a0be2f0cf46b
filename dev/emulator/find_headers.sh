#!/bin/sh
# find_headers.sh - prints the folder that has CUDA's include/: CUDA_HOME, the toolkit's, the system's, or that of pip's wheels
# (nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl together) in nvidia/ or the active Python. Status 1 if there is none.
# A folder inside the current one is printed relative to it.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
of_python() { "${PYTHON:-python3}" -c 'import sys; del sys.path[0]; import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null; }
IFS="
" # a folder's name may contain a space
for folder in "${CUDA_HOME:-}" /usr/local/cuda /usr/lib/cuda /usr "$root"/nvidia/* $(of_python | sed 's|$|/cu13|'); do
    [ -n "$folder" ] && [ -e "$folder/include/cuda_runtime.h" ] && [ -e "$folder/include/nv/target" ] && echo "${folder#"$PWD/"}" && exit
done
echo "CUDA's headers are missing: install the CUDA Toolkit, or name its folder by CUDA_HOME, or pip install nvidia-cuda-runtime" \
    "nvidia-cuda-crt nvidia-cuda-cccl, all of one version" >&2
exit 1
