#!/bin/sh
# Downloads Tiny Shakespeare, 1.1 MB of plays, and makes token files of it; each speech is a document.
#   sh dev/data/tinyshakespeare.sh [TOKENIZER] [FOLDER]     (bytes, data/tinyshakespeare)
# BASE_URL: another place to take it from.
set -eu
here=$(dirname -- "$0")
. "$here/download.sh"
tokenizer=${1:-bytes} out=${2:-data/tinyshakespeare} tokenize=${TOKENIZE:-build/tokenize}
base=${BASE_URL:-https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare}
[ -x "$tokenize" ] || fail "there is no $tokenize: make $tokenize"

download "$base/input.txt" "$out/input.txt" \
    is_exactly 1115394 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
"$tokenize" --tokenizer "$tokenizer" --split line --out "$out/train.bin" --val-out "$out/val.bin" --val-fraction 0.1 "$out/input.txt"
echo "now: ./train_gpt2_single --data $out/train.bin --val-data $out/val.bin --tokenizer $tokenizer"
