#!/bin/bash
# The download scripts with local files in place of their servers: downloads are checked, interrupted ones continue, and a
# missing file is an error that leaves no file behind.
. test/lib.sh

scripts=$PWD/dev/data
tokenize=$PWD/$BUILD/tokenize
cd "$work" || exit 1
mkdir server
command -v curl > /dev/null || { echo "1..0 # SKIP curl reads the stand-in's files, and is missing: sh dev/setup.sh"; exit 0; }
base=file://$work/server

for name in val_000000 train_000001 train_000002; do
    head -c 5000 "$scripts/tokenize.c" | "$tokenize" --out server/edu_fineweb_$name.bin - > /dev/null
done
fineweb() { BASE_URL=$base sh "$scripts/fineweb.sh" "$@"; }

shards_arrive() { fineweb 2 out && diff -r server out; }
what_is_there_stays() {
    mv server gone && fineweb 2 out
    local status=$?
    mv gone server
    return $status
}
what_broke_off_goes_on() {
    rm out/edu_fineweb_train_000001.bin
    head -c 3000 server/edu_fineweb_train_000001.bin > out/edu_fineweb_train_000001.bin.part
    fineweb 1 out && cmp {server,out}/edu_fineweb_train_000001.bin && [ ! -e out/edu_fineweb_train_000001.bin.part ]
}
broken_shards_are_refused() {
    rm -rf out
    head -c 3000 server/edu_fineweb_train_000002.bin > cut && mv cut server/edu_fineweb_train_000002.bin
    fails_with "train_000002.bin is not what it should be" "5001 tokens" "3000 bytes" -- fineweb 2 out || return 1
    echo '<html>' > server/edu_fineweb_train_000002.bin
    fails_with "train_000002.bin is not what it should be" "not a token file" -- fineweb 2 out || return 1
    [ "$(ls out)" = "$(printf 'edu_fineweb_train_000001.bin\nedu_fineweb_val_000000.bin')" ]
}
missing_shards_are_an_error() {
    rm server/edu_fineweb_train_000002.bin
    fails_with "cannot download $base/edu_fineweb_train_000002.bin" "network" -- fineweb 2 out
}
check "the shards asked for arrive, and the validation shard" shards_arrive
check "existing files are not fetched again" what_is_there_stays
check "an interrupted download continues" what_broke_off_goes_on
check "a shard that is cut, or a page of HTML, is refused" broken_shards_are_refused
check "a shard that the server does not have is an error" missing_shards_are_an_error
check "the number of shards must be a number" fails_with "from 1 to 1001" -- fineweb many
check "and not too large" fails_with "from 1 to 1001" -- fineweb 1002

echo '{"!": 0}' > server/vocab.json
echo 'First Citizen:' > server/input.txt

gpt2() { BASE_URL=$base sh "$scripts/gpt2.sh" "$@"; }
gpt2_is_checked() { fails_with "vocab.json is not what it should be" "9 bytes" -- gpt2 gpt2 out2 && [ -z "$(ls out2)" ]; }
shakespeare() { BASE_URL=$base TOKENIZE=$tokenize sh "$scripts/tinyshakespeare.sh" bytes tiny; }
shakespeare_is_checked() {
    fails_with "input.txt is not what it should be" "1115394" -- shakespeare || return 1
    head -c 1115394 /dev/zero > server/input.txt
    fails_with "its SHA-256 is" -- shakespeare && [ -z "$(ls tiny)" ]
}
no_network() { fails_with "cannot download" "network" -- env BASE_URL=http://127.0.0.1:9 sh "$scripts/gpt2.sh" gpt2 nothing; }
check "GPT-2's files must have its sizes and checksums" gpt2_is_checked
check "Tiny Shakespeare must have its size and checksum" shakespeare_is_checked
check "without a network the error says so" no_network
check "another model is an error" fails_with "must be gpt2, gpt2-medium" -- sh "$scripts/gpt2.sh" gpt3
done_testing
