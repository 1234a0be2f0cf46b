#!/bin/sh
# In which type should gradients be summed when numbers have 16 bits? FSDP in bf16 on two ranks, sums in fp32 and in bf16.
set -eu
. "$(dirname -- "$0")/../lib.sh"
begin reduce_dtype 5 fsdp:bf16 "$@"

model="--model d6 --batch-size 8 --seq-len 64 --steps 40"
[ -z "$quick" ] || model="--layers 2 --channels 32 --heads 2 --batch-size 2 --seq-len 16 --steps 3"
for round in $rounds; do
    for dtype in fp32 model; do run $dtype 2 fsdp:bf16 --data test/reference/tokens.bin $model --reduce-dtype $dtype; done
done
finish
