#!/bin/sh
# The default data, made of this repository's own text (code and documents), as bytes: nothing is downloaded.
#   sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM
# One file is one document. The order is that of the names, so the same tree gives the same data everywhere.
set -eu
[ $# -eq 2 ] || { echo "usage: sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM" >&2; exit 2; }
out=$1 tokenize=$2
mkdir -p "$out"
LC_ALL=C
export LC_ALL

# Only the folders that belong to the project: what is built, downloaded or checked out beside them is no part of it.
{
    find . -maxdepth 1 -type f \( -name '*.cu' -o -name '*.md' -o -name Makefile \)
    find ./llmc ./dev ./test ./doc -name reference -prune -o -type f \
        \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.c' -o -name '*.md' -o -name '*.sh' -o -name '*.py' -o -name '*.t' \) -print
} | sort | tr '\n' '\0' | xargs -0 -x "$tokenize" --tokenizer bytes --out "$out/train.bin" --val-out "$out/val.bin" --val-fraction 0.1 --
