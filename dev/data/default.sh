#!/bin/sh
# Makes the default data from the course's own code: nothing is downloaded.
#   sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM                              as bytes
#   sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM TRAIN_BPE_PROGRAM TOKENS     with a vocabulary trained on the same text
#
# Each file is a document: train.bin and val.bin, and for a vocabulary vocab.json and merges.txt. Files are in the order of their
# names, so the same tree gives the same data everywhere.
set -eu
[ $# -eq 2 ] || [ $# -eq 4 ] ||
    { echo "usage: sh dev/data/default.sh OUT_FOLDER TOKENIZE_PROGRAM [TRAIN_BPE_PROGRAM TOKENS]" >&2; exit 2; }
out=$1 tokenize=$2 train_bpe=${3:-} vocabulary=${4:-}
LC_ALL=C
export LC_ALL

# Files for validation, by name: a loss can then be compared with one from before an edit. The stages are near copies of each other,
# so none of them is among these files: a model would only have to memorise them.
validation='consistency.h device.cuh device_api.h logger.h matmul.cuh ring.h rng.h sampler.h lr_schedule.h shard.h'
is_for_validation() { case " $validation " in *" ${1##*/} "*) ;; *) return 1 ;; esac; }

# files train|val: the stages and their shared headers. With tests and tools the text would be too varied for a minute of training,
# and the losses that the documents quote would change whenever a test does.
files() {
    {
        find . -maxdepth 1 -type f -name '*.cu' -print
        find ./llmc -type f \( -name '*.cuh' -o -name '*.h' \) -print
    } | sort | while IFS= read -r file; do
        if is_for_validation "$file"; then side=val; else side=train; fi
        [ $side = "$1" ] && printf '%s\0' "$file"
    done
    true # the last file may have been for the other side
}
[ -n "$(files val | tr '\0' ' ')" ] || { echo "error: none of these is under llmc/: $validation; name others in $0" >&2; exit 1; }

mkdir -p "$out" || { echo "error: $out cannot be made; is this clone yours? chown it, or clone into a folder of your own" >&2; exit 1; }
tokenizer=bytes
if [ -n "$train_bpe" ]; then
    files train | xargs -0 -x "$train_bpe" --vocab-size "$vocabulary" --out "$out" --
    tokenizer=$out
fi
files val | xargs -0 -x "$tokenize" --tokenizer "$tokenizer" --out "$out/val.bin" --
files train | xargs -0 -x "$tokenize" --tokenizer "$tokenizer" --out "$out/train.bin" --
