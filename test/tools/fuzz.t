#!/bin/sh
# A short run of each fuzz target; `make fuzz` runs them for longer.
targets="tokens mask tokenizer safetensors"
seconds=${FUZZ_SECONDS:-6}
echo "1..$(echo $targets | wc -w)"
number=0
for target in $targets; do
    number=$((number + 1))
    what="the reader of $target survives $seconds s of hostile input"
    if [ ! -x build/fuzz/$target ]; then
        echo "ok $number - $what # SKIP clang with its fuzzer runtime is missing: sh dev/setup.sh"
    elif sh test/unit/fuzz.sh "$seconds" $target > build/fuzz/$target.log 2>&1; then
        echo "ok $number - $what"
    else
        echo "not ok $number - $what"
        tail -n 20 build/fuzz/$target.log | sed 's/^/# /'
    fi
done
