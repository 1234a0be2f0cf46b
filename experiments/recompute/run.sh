#!/bin/sh
# What does recomputing blocks cost in time, and what memory does it free? FSDP on two ranks, with short and with long sequences.
set -eu
. "$(dirname -- "$0")/../lib.sh"
begin recompute 5 fsdp "$@"

short="--model d6 --batch-size 8 --seq-len 64" long="--model d6 --batch-size 2 --seq-len 256" steps=13
[ -z "$quick" ] || { short="--layers 2 --channels 32 --heads 2 --batch-size 2 --seq-len 16" long="$short --seq-len 64" steps=3; }
for round in $rounds; do
    for recompute in none block; do
        run "short-$recompute" 2 fsdp --data test/reference/tokens.bin $short --steps $steps --recompute $recompute
        run "long-$recompute" 2 fsdp --data test/reference/tokens.bin $long --steps $steps --recompute $recompute
    done
done
finish
