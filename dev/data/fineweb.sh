#!/bin/sh
# Downloads FineWeb-Edu in GPT-2 tokens, as published for llm.c: shards of 100 million tokens, 200 MB each.
#   sh dev/data/fineweb.sh [SHARDS] [FOLDER]     (100: 10 billion tokens and 20 GB; data/fineweb-edu)
# There are 1001 training shards, and one for validation that is always downloaded. BASE_URL: another place to take them from.
set -eu
here=$(dirname -- "$0")
. "$here/download.sh"
shards=${1:-100} out=${2:-data/fineweb-edu}
base=${BASE_URL:-https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main}
case $shards in '' | *[!0-9]*) fail "SHARDS must be a number from 1 to 1001, not '$shards'" ;; esac
[ "$shards" -ge 1 ] && [ "$shards" -le 1001 ] || fail "SHARDS must be a number from 1 to 1001, not $shards"

download "$base/edu_fineweb_val_000000.bin" "$out/edu_fineweb_val_000000.bin" is_token_file
shard=1
while [ "$shard" -le "$shards" ]; do
    name=$(printf 'edu_fineweb_train_%06d.bin' "$shard")
    download "$base/$name" "$out/$name" is_token_file
    shard=$((shard + 1))
done
echo "now, with GPT-2's vocabulary from dev/data/gpt2.sh:"
echo "./train_gpt2_single --model gpt2 --data '$out/edu_fineweb_train_*.bin' --val-data $out/edu_fineweb_val_000000.bin --tokenizer data/gpt2 \\"
echo "    --seq-len 1024 --batch-size 4 --total-batch-size 524288 --lr 6e-4 --warmup-steps 700 --steps 18865"
