#!/bin/sh
# What does gathering ahead gain? FSDP on two ranks with each --prefetch, and without gathering ahead in the forward pass: as fast as
# this machine sends, and over a slower link (--emulate-link), where messages take as long as a network needs and no core.
set -eu
. "$(dirname -- "$0")/../lib.sh"
begin prefetch 6 fsdp "$@"

model="--model d6 --batch-size 4 --seq-len 64 --steps 16"
[ -z "$quick" ] || model="--layers 3 --channels 32 --heads 2 --batch-size 2 --seq-len 16 --steps 3"
for round in $rounds; do
    for link in "" link-; do
        slower=$([ -z "$link" ] || echo --comm mpi --emulate-link 8)
        for mode in none backward-post backward-pre; do
            run $link$mode 2 fsdp --data test/reference/tokens.bin $model --prefetch $mode $slower
        done
        run ${link}no-forward 2 fsdp --data test/reference/tokens.bin $model --no-forward-prefetch $slower
    done
done
finish
