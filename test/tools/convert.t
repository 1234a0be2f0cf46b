#!/bin/bash
# hf_import, hf_export and llmc_import as programs, without Hugging Face's libraries (test/interop has those): what they refuse,
# and that the command that an import ends with is one that works. A vocabulary may be smaller than that of any tokenizer.
. test/lib.sh

export_=$BUILD/hf_export import=$BUILD/hf_import llmc=$BUILD/llmc_import
byte() { printf "\\x$(printf %x $(($1 & 255)))"; }
le32() { byte "$1"; byte $(($1 >> 8)); byte $(($1 >> 16)); byte $(($1 >> 24)); }
# token_file FILE VOCABULARY: 700 tokens, the model of which has something to learn
token_file() {
    { le32 20240520; le32 1; le32 700; head -c 1012 /dev/zero
        for ((i = 0; i < 700; i++)); do byte $((i * i % $2)); byte 0; done; } > "$1"
}
# small VOCABULARY OPTION...: trains on such tokens, without a tokenizer
small() {
    local V=$1
    shift
    token_file "$work/tokens$V.bin" "$V"
    timeout 120 "$(program fp32)" --data "$work/tokens$V.bin" --val-data "$work/tokens$V.bin" --tokenizer= --vocab-size "$V" \
        --model d1 --heads 2 --channels 16 --seq-len 16 --batch-size 8 --lr 3e-3 --warmup-steps 2 "$@"
}

# ---- training without a tokenizer ----
learns_without() { # VOCABULARY: also where samples and evaluations are due
    local out=$work/out$1
    small "$1" --steps 20 --sample-every 5 --eval-every 20 --out "$out" || return 1
    sed -n 's/.*"val_loss":\([0-9.]*\).*/\1/p' "$out/metrics.jsonl" > "$work/losses"
    cat "$work/losses"
    awk -v V="$1" 'NR == 1 && $1 > 0.6 * log(V) { first = 1 } END { exit !(first && NR > 1 && $1 < 0.95 * log(V)) }' \
        "$work/losses" && grep -q '"val_loss_per_byte":null' "$out/metrics.jsonl"
}
for V in 2 50 256; do check "a vocabulary of $V trains on tokens without a tokenizer" learns_without $V; done
echo "some text" > "$work/text.txt"
check "text is refused without a tokenizer" \
    fails_with "$work/text.txt" "without a --tokenizer" -- small 50 --data "$work/text.txt"
check "a vocabulary must then be given" fails_with "--vocab-size" "not 0" -- small 50 --vocab-size 0
check "where the tokenizer is too large the error says what works" \
    fails_with "257 tokens" "only 50" "--tokenizer= " -- small 50 --tokenizer bytes

# ---- there and back ----
trains_as_it_says() { # VOCABULARY: the options that the import names, with the file of tokens put in
    local V=$1 said
    rm -rf "$work"/{hf,again,more}"$V"
    "$export_" "$work/out$V/step_00000020" "$work/hf$V" &&
        "$import" "$work/hf$V" "$work/again$V" > "$work/said" || return 1
    cat "$work/said"
    cmp "$work/out$V/step_00000020/model.safetensors" "$work/again$V/model.safetensors" || return 1
    said=$(sed -n 's/^to train from it: //p' "$work/said")
    [ -n "$said" ] || return 1
    # shellcheck disable=SC2086
    timeout 120 "$(program fp32)" ${said//TOKENS.bin/$work/tokens$V.bin} --seq-len 16 --batch-size 8 --steps 2 \
        --out "$work/more$V"
}
for V in 2 50 256; do check "an import of $V tokens trains by the command that it names" trains_as_it_says $V; done
plain_command() {
    "$export_" $REFERENCE/initial "$work/hf" && "$import" "$work/hf" "$work/plain" > "$work/said" && cat "$work/said" &&
        grep -qx "to train from it: --init-from $work/plain" "$work/said"
}
check "from 257 tokens on it names no tokenizer" plain_command

# ---- what hf_import refuses ----
changed=$work/changed
# import_refused PATTERN... -- COMMAND...: an import of the reference model, which the command has changed, fails and leaves nothing
import_refused() {
    local patterns=()
    while [ "$1" != -- ]; do patterns+=("$1"); shift; done
    shift
    rm -rf "$changed" "$work/none"
    cp -r "$work/hf" "$changed" && "$@" || return 1
    fails_with "${patterns[@]}" -- timeout 60 "$import" "$changed" "$work/none" &&
        [ -z "$(find "$work" -maxdepth 1 -name '*none*')" ]
}
last_value() { # BYTES: becomes the last weight of the file
    local size
    size=$(stat -c %s "$changed/model.safetensors")
    printf "$1" | dd of="$changed/model.safetensors" bs=1 seek=$((size - 4)) conv=notrunc status=none
}
config() { sed -i "s/\"vocab_size\"/$1, &/" "$changed/config.json"; } # one more member
epsilon() { sed -i "s/\"layer_norm_epsilon\": *[^,]*/\"layer_norm_epsilon\": $1/" "$changed/config.json"; }
fifo() { rm -f "$changed/$1" && mkfifo "$changed/$1"; }
folder_for() { rm -f "$changed/$1" && mkdir "$changed/$1"; }
check "NaN among the weights" import_refused "model.safetensors" "tensor 'transformer" "is nan" "download it again" -- \
    last_value '\0\0\xc0\x7f'
check "an infinite weight" import_refused "model.safetensors" "tensor 'transformer" "is -inf" -- last_value '\0\0\x80\xff'
check "an epsilon that differs in the sixth digit" import_refused "config.json" "is 1.00001e-05; only 1e-05" -- epsilon 1.00001e-5
check "quantised weights" import_refused "config.json" "quantization_config" "dequantize" -- \
    config '"quantization_config": {"load_in_8bit": true}'
accepted() { rm -rf "$changed" "$work/fine"; cp -r "$work/hf" "$changed" && "$@" && "$import" "$changed" "$work/fine"; }
check "an epsilon that is 1e-5 in fp32 is fine" accepted epsilon 9.999999747378752e-06
check "so is no quantisation" accepted config '"quantization_config": null'
for file in config.json model.safetensors; do
    check "a FIFO as $file" import_refused "$file: is a pipe, not a file" -- fifo $file
    check "a folder as $file" import_refused "$file: is a folder, not a file" -- folder_for $file
done

# ---- hf_export ----
checkpoint_with_fifo() { # FILE
    rm -rf "$changed" && cp -r $REFERENCE/initial "$changed" && rm "$changed/$1" && mkfifo "$changed/$1" &&
        fails_with "$1: is a pipe, not a file" -- timeout 60 "$export_" "$changed" "$work/none"
}
for file in state.json model.safetensors; do check "hf_export of a checkpoint with a FIFO as $file" checkpoint_with_fifo $file; done
mkdir "$work/pipes" && mkfifo "$work/pipes/vocab.json"
check "hf_export with a FIFO as tokenizer" fails_with "vocab.json: is a pipe" -- \
    timeout 60 "$export_" $REFERENCE/initial "$work/none" --tokenizer "$work/pipes"

# ---- llmc_import: a model of 1 layer, 2 heads, 8 channels, 50 tokens padded to 128, 16 positions, all zeros ----
{ for n in 20240326 3 16 50 1 2 8 128; do le32 $n; done; head -c $((992 + 4 * 2040)) /dev/zero; } > "$work/model.bin"
check "a model of llm.c is read" "$llmc" "$work/model.bin" "$work/from_llmc"
trains_from_llmc() { # the vocabulary is smaller than any tokenizer's, and the command says so
    rm -rf "$work/named"
    "$llmc" "$work/model.bin" "$work/named" | tee "$work/said" && grep -q -e "--tokenizer= --data TOKENS.bin" "$work/said" &&
        small 50 --steps 2 --sample-every 0 --init-from "$work/named" --channels 8
}
check "  and trains" trains_from_llmc
check "a folder is called one" fails_with "test: is a folder, not a file" -- "$llmc" test "$work/none"
check "the current folder, too" fails_with "\.: is a folder, not a file" -- "$llmc" . "$work/none"
mkfifo "$work/pipe.bin"
check "a FIFO is called a pipe" fails_with "pipe.bin: is a pipe, not a file" -- timeout 60 "$llmc" "$work/pipe.bin" "$work/none"
head -c 1023 "$work/model.bin" > "$work/short.bin"
check "a short file is called short" fails_with "short.bin: has 1023 bytes, less than the 1024" -- "$llmc" "$work/short.bin" "$work/none"
nan_in_llmc() {
    cp "$work/model.bin" "$work/nan.bin"
    printf '\0\0\xc0\x7f' | dd of="$work/nan.bin" bs=1 seek=2048 conv=notrunc status=none
    fails_with "nan.bin: tensor 'wte' has a value that is nan" -- "$llmc" "$work/nan.bin" "$work/none"
}
check "NaN among its weights" nan_in_llmc
check "none of these left a folder" test -z "$(find "$work" -maxdepth 1 -name '*none*')"
done_testing
