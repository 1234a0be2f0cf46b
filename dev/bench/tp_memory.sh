#!/bin/sh
# tp_memory.sh - what a rank keeps with tensor parallelism, measured in a step of training beside the formulas.
#
#   sh dev/bench/tp_memory.sh [--tp "1 2 4"] [OPTION OF THE PROGRAM...]
#
# Megabytes per rank. state: parameters, gradients and optimizer state; not cut: the part of it that every rank has. block: the
# activations that a block keeps, in numbers for each token and channel, of fp32 or of 16 bits, by formula. other: communication and
# workspace. sent: in a step, by a rank. A run that measures another number of bytes than it predicted ends this script.
#
# PROGRAM   default build/train_gpt2_tp    MPIRUN  how to start ranks (dev/on_ranks.sh)
set -eu
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
. dev/bench/options.sh

tp='1 2 4'
take_options "--tp" "$@"
eval "set -- $others"
most=1
for t in $tp; do
    case $t in ''|*[!0-9]*|0*) fail "--tp wants whole numbers from 1 on, not '$t'" ;; esac
    [ "$t" -le "$most" ] || most=$t
done
program=${PROGRAM:-build/train_gpt2_tp}
[ -x "$program" ] || fail "there is no $program; make train_gpt2_tp"
ranks_can_start "$most" 2>/dev/null
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# run T HOW OPTION...: a step; prints a line.
run() {
    t=$1 how=$2
    shift 2
    rm -rf "$work/out"
    on_ranks "$t" "$program" "$@" --tensor-parallel "$t" --steps 1 --val-data= --sample-every 0 --save-every 0 --out "$work/out" >"$work/log" 2>&1 ||
        { tail -n 20 "$work/log" >&2; fail "$program on $t rank(s) failed"; }
    number() { sed -n "s/.*\"$1\":\([0-9.e+]*\).*/\1/p"; }
    kinds=$(sed -n '1s/.*"predicted_bytes":{\([^}]*\)}.*/\1/p' "$work/out/metrics.jsonl")
    kept=$(for kind in parameters gradients 'optimizer state' activations communication workspace; do
        bytes=$(echo "$kinds" | number "$kind"); echo "${bytes:-0}"; done | tr '\n' ' ')
    bytes=4; head -n 1 "$work/out/metrics.jsonl" | grep -q '"precision":"fp32"' || bytes=2
    sent=$(tail -n 1 "$work/out/metrics.jsonl" | number comm_bytes)
    # "model 4 layers, 4 heads, 256 channels, vocabulary 257, context 128: ..."
    echo "$t $how $bytes ${sent:-0} $kept $(sed -n 's/^model  *//p' "$work/log" | tr -c '0-9\n' ' ')" | awk -v title="$title" '
        {
            t = $1; s = $2; X = $3; L = $11; NH = $12; C = $13; V = $14; T = $15
            Vp = int((V + 127) / 128) * 128
            copies = (6 * C * L + (T + 2) * C) * (X == 4 ? 16 : 2 * X + 12)
            block = s == 0 ? 4 + 12 / t : s == 1 ? 16 / t : 2 + 14 / t
            state = $5 + $6 + $7
            formula = ((12 * C * C + 7 * C) / t * L + Vp / t * C) * (X == 4 ? 16 : 2 * X + 12) + copies
            if (state != formula) { print "state " state ", by formula " formula; exit 1 }
            printf "%2d %-18s %10.1f %9.1f %9.1f %7.1f %8.2f %11.1f %6g %6.1f %6.1f %6.1f\n", t, title, $5 / 1e6, $6 / 1e6, $7 / 1e6, state / 1e6,
                copies / 1e6, $8 / 1e6, block, ($9 + $10) / 1e6, (state + $8 + $9 + $10) / 1e6, $4 / 1e6
        }'
}
echo " t                    parameters gradients optimizer   state  not cut activations  block  other  total   sent"
for t in $tp; do title=; run "$t" 0 "$@"; done
for t in $tp; do [ "$t" = 1 ] || { title='sequence parallel'; run "$t" 1 "$@" --sequence-parallel; }; done
for t in $tp; do [ "$t" = 1 ] || { title='keeps gathered'; run "$t" 2 "$@" --sequence-parallel --keep-gathered; }; done
