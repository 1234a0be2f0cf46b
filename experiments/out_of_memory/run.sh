#!/bin/sh
# What can FSDP train where DDP is out of memory? Two ranks that may use 0.3 GB each (--memory-limit): a model that fits DDP, one of twice
# the depth, one of three times, and one of eight times with shards on the host.
set -eu
. "$(dirname -- "$0")/../lib.sh"
begin out_of_memory 5 ddp,fsdp "$@"

shape="--channels 256 --heads 4" rest="--seq-len 64 --batch-size 1 --steps 13" depth=12 limit=0.3
[ -z "$quick" ] || shape="--channels 32 --heads 2" rest="--seq-len 16 --batch-size 1 --steps 3" depth=12 limit=0.0085
for round in $rounds; do
    run ddp-1 2 ddp $shape --layers $depth $rest --memory-limit $limit
    run fsdp-1 2 fsdp $shape --layers $depth $rest --memory-limit $limit
    refused=yes
    run ddp-2 2 ddp $shape --layers $((2 * depth)) $rest --memory-limit $limit
    refused=''
    run fsdp-2 2 fsdp $shape --layers $((2 * depth)) $rest --memory-limit $limit
    run fsdp-3 2 fsdp $shape --layers $((3 * depth)) $rest --memory-limit $limit
    run fsdp-8 2 fsdp $shape --layers $((8 * depth)) $rest --memory-limit $limit --recompute block --cpu-offload
done
finish
