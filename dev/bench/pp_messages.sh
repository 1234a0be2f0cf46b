#!/bin/sh
# pp_messages.sh - what each rank of a pipeline sends in a step, counted in a timeline of one step, beside the formulas.
#
#   sh dev/bench/pp_messages.sh [--ranks 4] [--pipeline-parallel P] [OPTION OF THE PROGRAM...]
#
# A line for each rank and kind of message: how many, the bytes of each, and what this rank sends for all of them. A message that is
# issued in a forward pass is an activation, in a backward pass a gradient. Sums: the root, over the two ranks that have it, the loss and
# two norms, and between replicas of the model their gradients. The script fails if a rank's bytes are not those of the formulas, or if
# rank 0's are not those that the program has counted.
#
# PROGRAM   default build/train_gpt2_pp    MPIRUN  how to start ranks (dev/on_ranks.sh)
set -eu
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
. dev/bench/options.sh

ranks=4 pipeline_parallel=
take_options "--ranks --pipeline-parallel" "$@"
eval "set -- $others"
p=${pipeline_parallel:-$ranks}
for number in $ranks $p; do case $number in ''|*[!0-9]*|0*) fail "--ranks and --pipeline-parallel want whole numbers from 1 on, not '$number'" ;; esac; done
program=${PROGRAM:-build/train_gpt2_pp}
[ -x "$program" ] || fail "there is no $program; make build/train_gpt2_pp"
ranks_can_start "$ranks" 2>/dev/null
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} on_ranks "$ranks" "$program" --val-data= --sample-every 0 --eval-every 0 "$@" --pipeline-parallel "$p" \
    --steps 1 --save-every 0 --trace "$work/trace.json" --out "$work/out" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; fail "$program failed"; }
grep -E '^(model|step   |pipeline)' "$work/log"
counted=$(sed -n 's/^{"step":1,.*"comm_bytes":\([0-9]*\).*/\1/p' "$work/out/metrics.jsonl")
option() { sed -n "1s/.*\"$1\":\([0-9]*\).*/\1/p" "$work/out/metrics.jsonl"; }
# "model      4 layers, 4 heads, 256 channels, vocabulary 257, context 128: ..."
shape() { sed -n "s/^model .*$1.*/\1/p" "$work/log"; }
# blocks of each rank, in the order of the ranks
blocks=$(sed -n 's/^  rank [0-9]* *\([0-9]*\) block.*/\1/p' "$work/log" | tr '\n' ' ')
# "step       4096 tokens in 8 micro-batches per rank"
micro=$(sed -n 's/^step  *[0-9]* tokens in \([0-9]*\) micro.*/\1/p' "$work/log")

# In the file a communication slice comes right before the moment of its issue (dev/tools/overlap_trace.py reads the same).
awk -v counted="$counted" -v ranks="$ranks" -v p="$p" -v m="$micro" -v v="$(option chunks)" -v blocks="$blocks" -v B="$(option batch-size)" \
    -v T="$(option seq-len)" -v C="$(shape ', \([0-9]*\) channels')" -v V="$(shape 'vocabulary \([0-9]*\)')" '
    function number(key) { return match($0, "\"" key "\":[0-9.]*") ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 : 0 }
    /^{"name":"wait/ { next }
    /"tid":0/ && /"ph":"X"/ { q = number("pid"); i = ++acts[q]; begin[q, i] = number("ts"); act[q, i] = substr($0, 10, 1) }
    /"tid":1/ && /"ph":"X"/ { name = substr($0, 10); sub(/".*/, "", name); step = number("step") }
    /"ph":"s"/ && step == 1 { ops++; op[ops] = name; at[ops] = number("ts"); who[ops] = number("pid") }
    function row(q, what, formula,   k, n) {
        n = count[q, what]
        for (k = 1; k <= sizes[q, what]; k++)
            printf "%4d  %-34s %7d %14d %14d\n", q, what, times[q, what, k], size[q, what, k], times[q, what, k] * size[q, what, k]
        if (sum[q, what] - formula > 1 || formula - sum[q, what] > 1) {
            printf "rank %d has sent %d bytes of %s, by formula %d\n", q, sum[q, what], what, formula
            wrong = 1
        }
    }
    END {
        for (i = 1; i <= ops; i++) {
            q = who[i]
            split(op[i], w, " ")
            match(op[i], /\([0-9]+ /); n = substr(op[i], RSTART + 1, RLENGTH - 2)
            X = op[i] ~ /fp64/ ? 8 : op[i] ~ /fp32/ ? 4 : 2
            N = op[i] ~ / of dp/ ? ranks / p : X == 8 ? p : 2
            if (w[1] == "receive" || w[1] == "barrier" || (w[1] == "all-reduce" && N == 1)) continue
            if (w[1] == "send") {
                in_act = "?"
                for (k = 1; k <= acts[q] && begin[q, k] <= at[i]; k++) in_act = act[q, k]
                what = in_act == "F" ? "activations, to the next stage" : "gradients, to the stage before"
                sent = n * X
            } else {
                what = op[i] ~ / of dp/ ? "all-reduce over copies" : X == 8 ? "all-reduce of the loss and norms" : "all-reduce of the root"
                sent = 2 * (N - 1) / N * n * X
            }
            if (X != 8) width = X
            for (k = 1; k <= sizes[q, what] && size[q, what, k] != sent; k++) ;
            if (k > sizes[q, what]) { sizes[q, what] = k; size[q, what, k] = sent }
            times[q, what, k]++
            sum[q, what] += sent
            total[q] += sent
        }
        split(blocks, blocks_of, " ")
        root = (int((V + 127) / 128) * 128 + T + 2) * C * width
        printf "%4s  %-34s %7s %14s %14s\n", "rank", "message", "number", "bytes of each", "sent"
        N = ranks / p
        for (q = 0; q < ranks; q++) {
            r = q % p
            P = blocks_of[r + 1] * (12 * C * C + 13 * C) * width + (r == 0 || r == p - 1 ? root : 0)
            row(q, "activations, to the next stage", m * (p == 1 ? 0 : v - (r == p - 1)) * B * T * C * width)
            row(q, "gradients, to the stage before", m * (p == 1 ? 0 : v - (r == 0)) * B * T * C * width)
            row(q, "all-reduce of the root", p > 1 && (r == 0 || r == p - 1) ? root : 0)
            row(q, "all-reduce of the loss and norms", 2 * (p - 1) / p * 24)
            row(q, "all-reduce over copies", 2 * (N - 1) / N * (P + 8))
            printf "%4d  %-34s %7s %14s %14d\n", q, "all", "", "", total[q]
        }
        if (total[0] - counted > 1 || counted - total[0] > 1) { print "the program has counted " counted " bytes on rank 0"; wrong = 1 }
        exit wrong
    }' "$work/trace.json"
