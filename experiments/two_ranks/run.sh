#!/bin/sh
# At which size of the model do two ranks stop being slower than one? The same batch on one rank and on two (DDP), for wider and wider
# models of two layers, with sequences of 32 tokens and of 128.
set -eu
. "$(dirname -- "$0")/../lib.sh"
begin two_ranks 5 single,ddp "$@"

widths="16 32 64 128 256 512" steps=50
[ -z "$quick" ] || widths="16 32" steps=3
for round in $rounds; do
    for length in 32 128; do
        for channels in $widths; do
            model="--layers 2 --channels $channels --heads $((channels / 16)) --seq-len $length --steps $steps"
            run one-$length-$channels 1 single --data test/reference/tokens.bin $model --batch-size 4
            run two-$length-$channels 2 ddp --data test/reference/tokens.bin $model --batch-size 2
        done
    done
done
finish
