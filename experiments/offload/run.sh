#!/bin/sh
# What does it cost to keep shards on the host (--cpu-offload), alone and with recomputation? FSDP on two ranks.
set -eu
. "$(dirname -- "$0")/../lib.sh"
begin offload 5 fsdp "$@"

model="--model d6 --batch-size 8 --seq-len 64 --steps 13"
[ -z "$quick" ] || model="--layers 2 --channels 32 --heads 2 --batch-size 2 --seq-len 16 --steps 3"
for round in $rounds; do
    run device 2 fsdp --data test/reference/tokens.bin $model --recompute none
    run host 2 fsdp --data test/reference/tokens.bin $model --recompute none --cpu-offload
    run recomputed 2 fsdp --data test/reference/tokens.bin $model --recompute block --cpu-offload
done
finish
