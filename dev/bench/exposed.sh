#!/bin/sh
# exposed.sh STEPS - what communication costs two ranks: a line "PROGRAM-MODE TOKENS exposed MS" for each of STEPS steps; rank 0
# waited for communication and computed nothing for MS milliseconds of it. Runs every mode once; bench.sh calls this every round.
#
# The DDP runs, naive and bucketed, compute much for each byte sent. The FSDP runs compute less, so a gather that the backward
# pass starts too late shows. (The forward pass gathers ahead in every mode; otherwise it would dominate the figure.)
# BUILD    default build         MPIRUN   how to start ranks (dev/on_ranks.sh)
set -eu
steps=$1 build=${BUILD:-build}
. dev/on_ranks.sh
ranks_launcher 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# exposed NAME TOKENS PROGRAM OPTION...: the first step also touches memory for the first time, and does not count.
exposed() {
    name=$1 tokens=$2
    shift 2
    OMP_NUM_THREADS=1 $launcher -np 2 "$@" --data test/reference/tokens.bin --val-data= --steps $((steps + 1)) --eval-every 0 \
        --sample-every 0 --out "$work/out" >"$work/log" 2>&1 || { echo "  $name failed: $(grep -m 1 error "$work/log")" >&2; return; }
    sed -n "s/^{\"step\":.*\"comm_exposed_ms\":\([0-9.e+-]*\).*/$name $tokens exposed \1/p" "$work/out/metrics.jsonl" |
        tail -n +2 | tee "$work/exposed"
    echo "  $name: $(awk '{ printf "%s%.1f", sep, $4; sep = " " }' "$work/exposed") ms exposed" >&2
    rm -rf "$work/out"
}
for mode in naive bucketed; do
    exposed "ddp-$mode" 2048 "$build/train_gpt2_ddp" --ddp $mode --bucket-mb 2 --batch-size 16 --seq-len 128
done
for mode in none backward-post backward-pre; do
    exposed "fsdp-$mode" 256 "$build/train_gpt2_fsdp" --prefetch $mode --model d6 --batch-size 4 --seq-len 64
done
