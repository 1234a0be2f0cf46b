#!/bin/sh
# demo.sh - trains a model from scratch on 4 ranks that each keep a quarter of its state (ZeRO stage 3), plots its loss, and
# measures what a rank keeps in every stage; then says what came out and where it lies. Takes two minutes on two cores.
#
#   make demo                             options of train_gpt2_zero may follow: sh dev/demo.sh --steps 100
#
# BUILD   folder of the programs (default build)    MPIRUN  how to start ranks (default mpirun --oversubscribe --bind-to none)
set -eu
cd "$(dirname -- "$0")/.."
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
export BUILD="${BUILD:-build}"
program=$BUILD/train_gpt2_zero out=$BUILD/demo
[ -x "$program" ] || fail "there is no $program; make demo builds it first"
ranks_can_start 4
set -- --batch-size 4 --steps 200 "$@" # a quarter of what one device has in a batch; later options overrule these

rm -rf "$out"
on_ranks 4 "$program" --zero-stage 3 --out "$out" "$@"

echo
sh dev/plot.sh "$out/metrics.jsonl" || echo "(no plot: see above; everything else is there)"
printf '\nWhat a rank of 4 keeps of this model, and sends:\n'
sh dev/zero_memory.sh --ranks 4 "$@"
echo
checkpoint=$(find "$out" -name 'step_*' -type d | sort | tail -n 1)
losses=$(sed -n 's/.*"val_loss" *: *\([0-9.]*\).*/\1/p' "$out/metrics.jsonl" | awk '{ last = $1; if (NR == 1) first = $1 }
    END { if (NR > 1) printf "%.2f at first, %.2f at the end (nats per byte)", first, last }')
if [ -n "$losses" ]; then echo "validation loss: $losses"; fi
echo "metrics: $out/metrics.jsonl, a line a step"
echo "checkpoint: $checkpoint"
steps=$(echo "${checkpoint##*_}" | awk '{ print 2 * $1 }')
echo "The samples are above, between the steps. To train as long again:"
echo "    $launcher -np 4 $program --zero-stage 3 --out $out --resume $* --steps $steps"
