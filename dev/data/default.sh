#!/bin/sh
# The default data, made of the course's own code, as bytes: nothing is downloaded.
#   sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM
# One file is one document. The order is that of the names, so the same tree gives the same data everywhere.
set -eu
[ $# -eq 2 ] || { echo "usage: sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM" >&2; exit 2; }
out=$1 tokenize=$2
mkdir -p "$out"
LC_ALL=C
export LC_ALL

# The stages and what they share. Tests and tools would make it too varied for a minute of training; and the documents quote what
# training prints, which must not change with them.
{
    find . -maxdepth 1 -type f -name '*.cu' -print
    find ./llmc -type f \( -name '*.cuh' -o -name '*.h' \) -print
} | sort | tr '\n' '\0' | xargs -0 -x "$tokenize" --tokenizer bytes --out "$out/train.bin" --val-out "$out/val.bin" --val-fraction 0.1 --
