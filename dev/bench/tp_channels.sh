#!/bin/sh
# tp_channels.sh - what share of a step tensor parallelism communicates, in models of more and more channels.
#
#   sh dev/bench/tp_channels.sh [--channels "128 256 512 1024"] [--rounds 3] [--steps 8] [--svg FILE] [OPTION OF THE PROGRAM...]
#
# Two ranks with a thread each share models of 4 layers with heads of 64 channels, and always have the same tokens. --no-overlap, so
# that a step either computes or communicates: communicating is what the log calls exposed, computing is the rest of the step.
# Both are medians over all steps but each run's first, as multiples of the line above. At fixed tokens the bytes grow with the
# channels C and the matrix products with C squared; the table has these laws beside what was measured. --svg draws both.
#
# BUILD   folder of the program (default build; make builds it)    MPIRUN  how to start ranks (dev/on_ranks.sh)
set -eu
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
. dev/bench/busy.sh
. dev/bench/options.sh

channels='128 256 512 1024' rounds=3 steps=8 svg=''
take_options "--channels --rounds --steps --svg" "$@"
eval "set -- $others"
for number in $channels $rounds $steps; do
    case $number in ''|*[!0-9]*|0*) fail "--channels, --rounds and --steps want whole numbers from 1 on, not '$number'" ;; esac
done
for C in $channels; do [ $((C % 128)) = 0 ] || fail "$C channels are not a multiple of 128: two ranks with whole heads of 64"; done
[ "$steps" -ge 2 ] || fail "--steps must be at least 2: the first is not counted"
program=${BUILD:-build}/train_gpt2_tp
[ -x "$program" ] || fail "there is no $program; make train_gpt2_tp"
ranks_can_start 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
busy=$(busy_percent)

for round in $(seq "$rounds"); do
    for C in $channels; do
        rm -rf "$work/out"
        OMP_NUM_THREADS=1 on_ranks 2 "$program" --data test/reference/tokens.bin --val-data= --sample-every 0 --eval-every 0 --layers 4 \
            --channels "$C" --heads $((C / 64)) --batch-size 4 --seq-len 128 --no-overlap "$@" --steps "$steps" --out "$work/out" \
            >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; fail "$C channels failed"; }
        sed -n 's/^{"step":[0-9]*,"loss".*"step_ms":\([0-9.eE+]*\).*"comm_bytes":\([0-9]*\),"comm_exposed_ms":\([0-9.eE+]*\).*/\1 \3 \2/p' \
            "$work/out/metrics.jsonl" | tail -n +2 | sed "s/^/$C /" >>"$work/results"
        rm -rf "$work/out"
        echo "  round $round: $C channels" >&2
    done
done

# One line for each model: channels, computing, communicating, their sum (medians, milliseconds), bytes sent.
awk '
    function median(x, n,   i, k, t) {
        for (i = 2; i <= n; i++) { t = x[i]; for (k = i - 1; k > 0 && x[k] > t; k--) x[k + 1] = x[k]; x[k + 1] = t }
        return n % 2 ? x[(n + 1) / 2] : (x[n / 2] + x[n / 2 + 1]) / 2
    }
    !($1 in n) { order[++models] = $1 }
    { i = ++n[$1]; compute[$1, i] = $2 - $3; wait[$1, i] = $3; share[$1, i] = $3 / $2; sent[$1] = $4 }
    END {
        for (m = 1; m <= models; m++) {
            C = order[m]
            delete x; for (i = 1; i <= n[C]; i++) x[i] = compute[C, i]; a = median(x, n[C])
            delete x; for (i = 1; i <= n[C]; i++) x[i] = wait[C, i]; b = median(x, n[C])
            delete x; for (i = 1; i <= n[C]; i++) x[i] = share[C, i]
            print C, a, b, median(x, n[C]), sent[C]
        }
    }' "$work/results" >"$work/medians"

echo
echo "| channels | sent | computing, over the line above | C squared | communicating, over the line above | C | share of a step that communicates |"
echo "|---|---|---|---|---|---|---|"
awk '
    {
        printf "| %d | %.1f MB |", $1, $5 / 1e6
        if (NR == 1) printf " | | | |"
        else printf " %.1f | %.3g | %.1f | %.3g |", $2 / compute, ($1 / C) ^ 2, $3 / wait, $1 / C
        printf " %.1f %% |\n", 100 * $4
        C = $1; compute = $2; wait = $3
    }' "$work/medians"
if [ "$busy" -gt 5 ]; then printf '\nOther programs used %s %% of this machine before the first run: do not trust these figures.\n' "$busy"; fi
[ -n "$svg" ] || exit 0

# Both axes are logarithmic, so a law is a straight line, and its power is its slope.
awk '
    function log2(x) { return log(x) / log(2) }
    function px(C) { return 70 + (C - low) * 480 / (high - low) }
    function py(v) { return 330 - (v - bottom) * 290 / (top - bottom) }
    function text(x, y, anchor, s) { printf "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, s }
    function line(x, y, x2, y2, style) { printf "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x, y, x2, y2, style }
    function series(v, colour, slope,   i, dots) {
        line(px(x[1]), py(v[NR] - slope * (x[NR] - x[1])), px(x[NR]), py(v[NR]), "stroke=\"" colour "\" stroke-dasharray=\"5 4\"")
        for (i = 1; i <= NR; i++) {
            dots = dots sprintf("%.1f,%.1f ", px(x[i]), py(v[i]))
            printf "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"/>\n", px(x[i]), py(v[i]), colour
        }
        printf "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n", dots, colour
    }
    { x[NR] = log2($1); compute[NR] = log2($2); wait[NR] = log2($3); channels[NR] = $1; share[NR] = 100 * $4 }
    END {
        low = x[1]; high = x[NR]; if (high == low) high++
        bottom = top = wait[1]
        for (i = 1; i <= NR; i++) {
            if (wait[i] < bottom) bottom = wait[i]
            if (compute[i] > top) top = compute[i]
            if (compute[i] < bottom) bottom = compute[i]
        }
        law = compute[NR] - 2 * (x[NR] - x[1]); if (law < bottom) bottom = law
        law = wait[NR] - (x[NR] - x[1]); if (law < bottom) bottom = law
        bottom -= 0.5; top += 0.5
        print "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 400\" width=\"720\" height=\"400\" font-family=\"sans-serif\" font-size=\"12\">"
        print "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
        text(70, 20, "start", "time of a step on two ranks with the same tokens; each line of the grid is twice the one below it")
        for (i = 0; bottom + i <= top; i++) line(70, py(bottom + i), 550, py(bottom + i), "stroke=\"#dddddd\"")
        for (i = 1; i <= NR; i++) {
            line(px(x[i]), 330, px(x[i]), 40, "stroke=\"#dddddd\"")
            text(px(x[i]), 348, "middle", channels[i])
            text(px(x[i]), 364, "middle", sprintf("%.0f %%", share[i]))
        }
        text(310, 388, "middle", "channels C, and the share of a step that communicates")
        series(compute, "#3a86b7", 2)
        series(wait, "#c1121f", 1)
        text(558, py(compute[NR]) + 4, "start", "computing")
        text(558, py(compute[NR]) + 20, "start", "(dashed: C squared)")
        text(558, py(wait[NR]) + 4, "start", "communicating")
        text(558, py(wait[NR]) + 20, "start", "(dashed: C)")
        print "</svg>"
    }' "$work/medians" >"$svg"
echo
echo "picture: $svg"
