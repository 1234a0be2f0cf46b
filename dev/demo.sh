#!/bin/sh
# demo.sh - trains the default model from scratch, plots its loss, and says what came out and where it lies.
#
#   make demo                             options of train_gpt2_single may follow: sh dev/demo.sh --steps 100
set -eu
cd "$(dirname -- "$0")/.."
program=${BUILD:-build}/train_gpt2_single
out=${BUILD:-build}/demo
[ -x "$program" ] || { echo "error: there is no $program; make demo builds it first" >&2; exit 1; }

rm -rf "$out"
"$program" --out "$out" "$@"

echo
sh dev/plot.sh "$out/metrics.jsonl" || echo "(no plot: see above; everything else is there)"
checkpoint=$(find "$out" -name 'step_*' -type d | sort | tail -n 1)
losses=$(sed -n 's/.*"val_loss" *: *\([0-9.]*\).*/\1/p' "$out/metrics.jsonl" | awk '{ last = $1; if (NR == 1) first = $1 }
    END { if (NR > 1) printf "%.2f at first, %.2f at the end (nats per byte)", first, last }')
if [ -n "$losses" ]; then echo "validation loss: $losses"; fi
echo "metrics: $out/metrics.jsonl, a line a step"
echo "checkpoint: $checkpoint"
steps=$(echo "${checkpoint##*_}" | awk '{ print 2 * $1 }')
echo "The samples are above, between the steps. To train as long again:"
echo "    $program --out $out --resume${*:+ $*} --steps $steps"
