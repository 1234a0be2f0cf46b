#!/bin/sh
# Downloads OpenAI's GPT-2 from Hugging Face: vocabulary, merges and weights.
#   sh dev/data/gpt2.sh [gpt2|gpt2-medium|gpt2-large|gpt2-xl] [FOLDER]     (gpt2, data/MODEL)
# WEIGHTS=no: only the tokenizer's files. BASE_URL: another place to take the files from.
set -eu
here=$(dirname -- "$0")
. "$here/download.sh"
model=${1:-gpt2}
out=${2:-data/$model}
revision=main is_weights=true # build/hf_import looks at them
case $model in
    gpt2) revision=607a30d783dfa663caf39e06633721c8d4cfcd7e # to which the checksum belongs
        is_weights="is_exactly 548105171 248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707" ;;
    gpt2-medium | gpt2-large | gpt2-xl) ;;
    *) fail "the model must be gpt2, gpt2-medium, gpt2-large or gpt2-xl, not '$model'" ;;
esac
base=${BASE_URL:-https://huggingface.co/openai-community/$model/resolve/$revision}

# All four have the same vocabulary.
download "$base/vocab.json" "$out/vocab.json" is_exactly 1042301 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
download "$base/merges.txt" "$out/merges.txt" is_exactly 456318 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
[ "${WEIGHTS:-yes}" != no ] || exit 0
download "$base/config.json" "$out/config.json" mentions n_embd
# shellcheck disable=SC2086 # a command and its words
download "$base/model.safetensors" "$out/model.safetensors" $is_weights
echo "now: build/hf_import $out $out/checkpoint && ./train_gpt2_single --init-from $out/checkpoint --tokenizer $out ..."
