#!/bin/sh
# Makes the default data from the course's own code, as bytes: nothing is downloaded.
#   sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM
# Each file is a document. Files are in the order of their names, so the same tree gives the same data everywhere.
set -eu
[ $# -eq 2 ] || { echo "usage: sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM" >&2; exit 2; }
out=$1 tokenize=$2
mkdir -p "$out"
LC_ALL=C
export LC_ALL

# The stages and their shared headers. With tests and tools the text would be too varied for a minute of training, and the losses
# that the documents quote would change whenever a test does.
{
    find . -maxdepth 1 -type f -name '*.cu' -print
    find ./llmc -type f \( -name '*.cuh' -o -name '*.h' \) -print
} | sort | tr '\n' '\0' | xargs -0 -x "$tokenize" --tokenizer bytes --out "$out/train.bin" --val-out "$out/val.bin" --val-fraction 0.1 --
