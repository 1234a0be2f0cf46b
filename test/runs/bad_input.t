#!/bin/bash
# Wrong options, foreign or damaged files, a full disk: each ends the run with status 1 and a message that names what is
# wrong, what was found and what to do; and no good checkpoint is lost.
. test/lib.sh

le32() { printf "\\x$(printf %02x $(($1 & 255)))\\x$(printf %02x $(($1 >> 8 & 255)))\\x$(printf %02x $(($1 >> 16 & 255)))\\x$(printf %02x $(($1 >> 24 & 255)))"; }
poke() { le32 "$3" | head -c "${4:-4}" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; } # FILE OFFSET VALUE [BYTES]
flip_bit() { # FILE OFFSET
    poke "$1" "$2" $(($(od -An -tu1 -j "$2" -N 1 "$1") ^ 1)) 1
}
damaged_tokens() { cp $REFERENCE/tokens.bin "$work/tokens.bin"; poke "$work/tokens.bin" "$@"; } # OFFSET VALUE [BYTES]

# ---- options ----
check "an unknown option" refused "unknown option '--frobnicate'" "--help" -- fp32 --frobnicate
check "a word where a number belongs" refused "--steps" "'ten'" -- fp32 --steps ten
check "a number out of range names the range" refused "--seq-len" "between 1 and" -- fp32 --seq-len 0
check "a negative number" refused "--lr" "between 0 and" -- fp32 --lr -1
check "NaN where a number belongs" refused "--lr" -- fp32 --lr nan
check "an unknown choice names the choices" refused "--lr-schedule" "cosine|linear|constant|wsd" "'square'" -- fp32 --lr-schedule square
check "an option without its value" refused "--out needs a value" -- fp32 --out
check "an unknown model names the known ones" refused "--model" "huge" "gpt2-xl" -- fp32 --model huge
check "channels that do not divide over the heads" refused "--channels" "15" "2 heads" -- fp32 --channels 15
check "a total batch that is not a multiple of the micro-batch" refused "--total-batch-size" 500 256 -- fp32 --total-batch-size 500
for limit in -1 nan inf 0.5GB "" 1e7; do
    check "--memory-limit '$limit'" refused "--memory-limit" -- fp32 --memory-limit "$limit"
done
check "a run beyond --memory-limit stops before it takes more" memory_limit_holds tiny fp32
check "a model larger than any machine" refused "[Mm]emory" "GB" -- fp32 --channels 65536 --layers 256

# ---- the model's shape, and the tokenizer ----
check "T beyond the model's context" refused "--seq-len 2048" "1024" -- fp32 --model gpt2 --layers 1 --seq-len 2048 --batch-size 1 --total-batch-size 0
check "T beyond the checkpoint's context" refused "--seq-len 64" "32" -- fp32 --model d2 --init-from $REFERENCE/initial --heads 4 --channels 32 --seq-len 64
check "a vocabulary smaller than the tokenizer's" refused "--tokenizer" 257 200 -- fp32 --vocab-size 200
check "a tokenizer that is not there" refused "$work/none.json" -- fp32 --tokenizer "$work/none.json"
echo "{ this is not a vocabulary" > "$work/vocab.json"
check "a vocab.json that is not JSON" refused "$work/vocab.json" -- fp32 --tokenizer "$work/vocab.json"
check "a file that is not a tokenizer at all" refused "README.md" -- fp32 --tokenizer README.md

# ---- tokens and text ----
check "token file missing" refused "--data" "$work/none.bin" -- fp32 --data "$work/none.bin"
check "a glob without a match" refused "--data" "$work/none\*.bin" -- fp32 --data "$work/none*.bin"
check "validation data missing" refused "--val-data" "$work/none.bin" -- fp32 --val-data "$work/none.bin"
check "a folder as data" refused "test: is a folder, not a file" -- fp32 --data test
: > "$work/empty.txt"
check "an empty text file" refused "$work/empty.txt" "empty" -- fp32 --data "$work/empty.txt"
check "a binary file as text" refused "$(program fp32)" "NUL" -- fp32 --data "$(program fp32)"
echo "too short" > "$work/short.txt"
check "a text shorter than a sequence" refused "$work/short.txt" "--seq-len" -- fp32 --data "$work/short.txt"
check "T longer than the data" refused "tokens.bin" "--seq-len" 8000 -- fp32 --seq-len 8000 --batch-size 1 --total-batch-size 0
check "a batch larger than the data" refused "tokens.bin" "sequences" 500 -- fp32 --batch-size 500 --total-batch-size 0
damaged_tokens 0 20240521
check "wrong magic" refused "$work/tokens.bin" 20240521 20240520 -- fp32 --data "$work/tokens.bin"
damaged_tokens 4 2
check "wrong version" refused "$work/tokens.bin" "version 2" "version 1" -- fp32 --data "$work/tokens.bin"
for count in 7000 100 -1 2147483647; do
    damaged_tokens 8 $count
    check "a header that says $count tokens" refused "$work/tokens.bin" "says $count tokens" 6734 -- fp32 --data "$work/tokens.bin"
done
for position in 0 3333 6720; do
    damaged_tokens $((1024 + 2 * position)) 999 2
    check "token $position beyond the vocabulary" refused "$work/tokens.bin" "token $position is 999" 257 -- fp32 --steps 40 --data "$work/tokens.bin"
done
all_lengths_refused() {
    local length
    for length in 0 1 4 12 1023 1024 1025 1026 5000 14491; do
        head -c $length $REFERENCE/tokens.bin > "$work/cut.bin"
        refused "$work/cut.bin" "tok" -- fp32 --data "$work/cut.bin" || { echo "cut to $length bytes"; return 1; }
    done
}
check "a token file that is cut at any length" all_lengths_refused

# ---- checkpoints ----
good=$work/good
check "two good checkpoints" tiny fp32 --steps 2 --save-every 1 --out "$good"
last=$good/step_00000002
check "--init-from a folder that is not there" refused "$work/none" "no such checkpoint" -- fp32 --init-from "$work/none"
check "--init-from a folder that is not a checkpoint" refused "test" "state.json" -- fp32 --init-from test
check "--init-from a folder of checkpoints names the newest" refused "$last" -- fp32 --init-from "$good"
check "--init-from another shape" refused "$last" "2 layers" "3" -- fp32 --init-from "$last" --layers 3
check "--init-from other channels" refused "$last" "16 channels" "32" -- fp32 --init-from "$last" --channels 32

# COMMAND...: it damages the newest checkpoint; a resume then names that one, and the older one to fall back to
damage_is_refused() {
    rm -rf "$work/bad" && cp -r "$good" "$work/bad"
    "$@"
    refused "step_00000002" "fall back to $work/bad/step_00000001" -- fp32 --resume --out "$work/bad" --steps 3 || { echo "damage: $*"; return 1; }
}
cuts_are_refused() { # FILE
    local size length
    size=$(stat -c %s "$last/$1")
    for length in 0 1 7 8 9 $((size / 3)) $((size / 2)) $((size - 1)); do
        damage_is_refused truncate -s "$length" "$work/bad/step_00000002/$1" || return 1
    done
    damage_is_refused truncate -s $((size + 1)) "$work/bad/step_00000002/$1"
}
random_offset() { # FILE SIZE: but not in the 17th digit of a number, which often changes nothing of the number's value
    local offset
    while offset=$((RANDOM % $2)); [[ $(head -c $offset "$1" | tail -c 16 | tr -d '\0') =~ ^[0-9.]{16}$ ]]; do :; done
    echo $offset
}
flips_are_refused() { # FILE: in its header, in its data, in its last byte
    local size offset any
    size=$(stat -c %s "$last/$1")
    any="$(random_offset "$last/$1" $size) $(random_offset "$last/$1" $size) $(random_offset "$last/$1" $size)"
    for offset in 0 7 9 $((size / 50)) $((size / 7)) $((size / 2)) $((size - 2)) $any; do
        damage_is_refused flip_bit "$work/bad/step_00000002/$1" "$offset" || return 1
    done
}
for file in model.safetensors optimizer.safetensors state.json; do
    check "$file cut at any length, or grown" cuts_are_refused $file
    check "$file with any one bit wrong" flips_are_refused $file
done
# ---- pipes in place of files: no reader waits for what nobody writes into a FIFO ----
no_wait() { # PATTERN... -- OPTION...: the run fails so, at once
    local patterns=()
    while [ "$1" != -- ]; do patterns+=("$1"); shift; done
    shift
    fails_with "${patterns[@]}" -- timeout 60 "$(program fp32)" --data $REFERENCE/tokens.bin --val-data= --model d2 --heads 2 \
        --channels 16 --seq-len 16 --batch-size 16 --total-batch-size 512 --steps 3 --sample-every 0 "$@"
}
mkfifo "$work/fifo" "$work/fifo.bin" "$work/fifo.json"
check "a FIFO as --data" no_wait "$work/fifo: is a pipe, not a file" -- --data "$work/fifo"
check "a FIFO as --data, named .bin" no_wait "$work/fifo.bin: is a pipe, not a file" -- --data "$work/fifo.bin"
check "a FIFO as --val-data" no_wait "$work/fifo: is a pipe, not a file" -- --val-data "$work/fifo"
check "a FIFO as --tokenizer" no_wait "$work/fifo.json: is a pipe, not a file" -- --tokenizer "$work/fifo.json"
check "a device as --data" no_wait "/dev/zero: is a device, not a file" -- --data /dev/zero
fifo_in_checkpoint() { # FILE OPTION...: of the newest checkpoint
    rm -rf "$work/bad" && cp -r "$good" "$work/bad" && rm "$work/bad/$1" && mkfifo "$work/bad/$1" &&
        no_wait "$1: is a pipe, not a file" -- "${@:2}"
}
for file in model.safetensors optimizer.safetensors state.json; do
    check "a FIFO as $file, resumed" fifo_in_checkpoint step_00000002/$file --resume --out "$work/bad"
    check "  and as what a run starts from" fifo_in_checkpoint step_00000002/$file --init-from "$work/bad/step_00000002"
done
check "a FIFO as metrics.jsonl of the run to resume" fifo_in_checkpoint metrics.jsonl --resume --out "$work/bad"
check "a missing model.safetensors" damage_is_refused rm "$work/bad/step_00000002/model.safetensors"
check "a new run does not start among the checkpoints of another" \
    refused "$good holds the checkpoints of another run" "--resume" -- fp32 --out "$good" --steps 3
check "the good one still resumes" tiny fp32 --resume --out "$good" --steps 3

# ---- where things are written ----
: > "$work/file"
check "--out is a file" refused "$work/file" -- fp32 --out "$work/file"
check "--out below a file" refused "$work/file" "Not a directory" -- fp32 --out "$work/file/out"
check "--out where nobody can write" refused "/proc/none" -- fp32 --out /proc/none
disk_full_loses_nothing() { # OUT COMMAND...: a run that fails to save, after earlier saves succeeded
    local out=$1 before
    shift
    before=$(cd "$out" && md5sum step_*/*)
    fails_with "$out" "another --out\|make room" -- "$@" || return 1
    [ -z "$(find "$out" -name '.tmp*')" ] || { echo "half a checkpoint is left"; return 1; }
    (cd "$out" && echo "$before" | md5sum -c --quiet)
}
limited() { # files may have at most 64 kB; the signal that would kill the program for a larger one is ignored
    (trap '' XFSZ; ulimit -f 64; "$@")
}
check "no space for a file: the existing checkpoints stay" \
    disk_full_loses_nothing "$good" limited tiny fp32 --resume --out "$good" --steps 5 --save-every 1
check "  and the run continues when there is space" tiny fp32 --resume --out "$good" --steps 5
disk=$work/disk
mkdir "$disk"
if mount -t tmpfs -o size=512k tmpfs "$disk" 2> "$work/mount.log"; then
    trap 'umount "$disk"; rm -rf "$work"' EXIT
    check "a small disk takes two checkpoints" tiny fp32 --steps 2 --save-every 1 --keep 0 --out "$disk/out"
    check "  a full disk leaves them alone" \
        disk_full_loses_nothing "$disk/out" tiny fp32 --resume --out "$disk/out" --save-every 1 --keep 0
    check "  and the newest loads" tiny fp32 --resume --out "$disk/out" --steps "$(ls -d "$disk"/out/step_* | tail -n 1 | sed 's/.*_0*//')"
else
    skip "a full disk" "$(head -n 1 "$work/mount.log")"
fi
done_testing
