#!/bin/sh
# tp_sums.sh - what a rank sends in each part of a step with tensor parallelism, counted in a timeline of one step.
#
#   sh dev/bench/tp_sums.sh [--ranks 2] [--tensor-parallel T] [--model OPTION OF THE PROGRAM...]
#
# A line for each part of a step, operation and length: how many, how many bytes of values each is about, and the bytes that this
# rank sends for one of them and for all. An operation belongs to the part in which it was issued. The sum of all is compared with
# the bytes that the program has counted, and the script fails if they differ. Operations between replicas of the model are marked.
#
# PROGRAM   default build/train_gpt2_tp    MPIRUN  how to start ranks (dev/on_ranks.sh)
set -eu
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
. dev/bench/options.sh

ranks=2 tensor_parallel=
take_options "--ranks --tensor-parallel" "$@"
eval "set -- $others"
t=${tensor_parallel:-$ranks}
for number in $ranks $t; do case $number in ''|*[!0-9]*|0*) fail "--ranks and --tensor-parallel want whole numbers from 1 on, not '$number'" ;; esac; done
program=${PROGRAM:-build/train_gpt2_tp}
[ -x "$program" ] || fail "there is no $program; make train_gpt2_tp"
ranks_can_start "$ranks" 2>/dev/null
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} on_ranks "$ranks" "$program" --val-data= --sample-every 0 "$@" --tensor-parallel "$t" --steps 1 --save-every 0 \
    --trace "$work/trace.json" --out "$work/out" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; fail "$program failed"; }
grep -E '^(model|step   |mesh)' "$work/log"
counted=$(sed -n 's/^{"step":1,.*"comm_bytes":\([0-9]*\).*/\1/p' "$work/out/metrics.jsonl")

# In the file a communication slice comes right before the moment of its issue (dev/tools/overlap_trace.py reads the same).
awk -v counted="$counted" -v ranks="$ranks" -v t="$t" '
    function number(key) { return match($0, "\"" key "\":[0-9.]*") ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 : 0 }
    !/"pid":0,/ { next }
    /^{"name":"wait/ { next }
    /"tid":0/ && /"ph":"X"/ {
        part = substr($0, 10); sub(/".*/, "", part); sub(/ [0-9]+$/, "s", part)
        begin[++parts] = number("ts"); what[parts] = part
    }
    /"tid":1/ && /"ph":"X"/ { name = substr($0, 10); sub(/".*/, "", name) }
    /"ph":"s"/ { op[++ops] = name; at[ops] = number("ts") }
    END {
        for (i = 1; i <= ops; i++) {
            part = "before"
            for (k = 1; k <= parts; k++) if (begin[k] <= at[i] && (part == "before" || begin[k] >= last)) { part = what[k]; last = begin[k] }
            split(op[i], w, / #[0-9]+/)
            kind = w[1]
            N = op[i] ~ / of tp/ ? t : op[i] ~ / of dp/ ? ranks / t : ranks
            if (N == 1 || kind == "barrier") continue
            match(op[i], /\([0-9]+ /); n = substr(op[i], RSTART + 1, RLENGTH - 2)
            X = op[i] ~ /fp64/ ? 8 : op[i] ~ /fp32/ ? 4 : 2
            sent = kind == "all-reduce" ? 2 * (N - 1) / N * n * X : (N - 1) * n * X
            values = kind == "all-reduce" ? n * X : N * n * X
            kind = kind (op[i] ~ / of dp/ ? ", copies" : "")
            key = part "|" kind "|" values "|" sent
            if (!(key in count)) order[++keys] = key
            count[key]++
            total += sent
        }
        printf "%-22s %-22s %6s %13s %13s %13s\n", "part of a step", "operation", "number", "bytes of each", "sent for one", "sent"
        for (k = 1; k <= keys; k++) {
            split(order[k], w, "|")
            printf "%-22s %-22s %6d %13d %13d %13d\n", w[1], w[2], count[order[k]], w[3], w[4], count[order[k]] * w[4]
        }
        printf "%-22s %-22s %6s %13s %13s %13d\n", "all", "", "", "", "", total
        if (total - counted > 1 || counted - total > 1) { print "the program has counted " counted " bytes"; exit 1 }
    }' "$work/trace.json"
