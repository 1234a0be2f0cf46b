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

# What a reader of the course reads: the stages, llmc/ and doc/. Tests and tools would make it too varied for a minute of training.
{
    find . -maxdepth 1 -type f \( -name '*.cu' -o -name '*.md' -o -name Makefile \)
    find ./llmc ./doc -type f \
        \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.c' -o -name '*.md' -o -name '*.sh' -o -name '*.py' -o -name '*.t' \) -print
} | sort | tr '\n' '\0' | xargs -0 -x "$tokenize" --tokenizer bytes --out "$out/train.bin" --val-out "$out/val.bin" --val-fraction 0.1 --
