#!/bin/sh
# Makes the default data from course.tar.gz, the programs and llmc/ as they were on 2026-11-25: nothing is downloaded, and a loss that a
# document quotes does not change with the code.
#   sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM                              as bytes
#   sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM TRAIN_BPE_PROGRAM TOKENS     with a vocabulary trained on the same text
#
# Each file is a document: train.bin and val.bin, and for a vocabulary vocab.json and merges.txt. The programs are near copies of each
# other, so none of them is for validation: a model would only have to memorise them.
set -eu
[ $# -eq 2 ] || [ $# -eq 4 ] ||
    { echo "usage: sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM [TRAIN_BPE_PROGRAM TOKENS]" >&2; exit 2; }
LC_ALL=C
export LC_ALL
absolute() { echo "$(cd -- "$(dirname -- "$1")" && pwd)/$(basename -- "$1")"; }
text=$(mktemp -d)
trap 'rm -rf "$text"' EXIT
tar -xzf "$(dirname -- "$0")/course.tar.gz" -C "$text"
files() { find "$text/$1" -type f | sort | tr '\n' '\0'; } # train|val

mkdir -p "$1" || { echo "error: $1 cannot be made; is this clone yours? chown it, or clone into a folder of your own" >&2; exit 1; }
tokenizer=bytes
if [ $# -eq 4 ]; then
    files train | xargs -0 -x "$(absolute "$3")" --vocab-size "$4" --out "$1" --
    tokenizer=$1
fi
for side in val train; do files $side | xargs -0 -x "$(absolute "$2")" --tokenizer "$tokenizer" --out "$1/$side.bin" --; done
