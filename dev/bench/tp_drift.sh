#!/bin/sh
# tp_drift.sh - how far a run with tensor parallelism may differ from one device although nothing is wrong.
#
#   sh dev/bench/tp_drift.sh [--tp "2 4"] [--at "1 10 20 40"] [OPTION OF THE PROGRAMS...]
#
# Trains one model on one device and on t ranks that share it, in fp32 and in bf16, with the same data and the same global batch.
# The table has the largest relative differences of the loss and of the gradient norm to the single program of the same precision,
# over the steps up to each of --at. Its last line compares the single program in fp32 and in bf16. All other options are the
# programs'.
#
# BUILD   folder of the fp32 programs (default build; the bf16 ones are in BUILD/bf16)    MPIRUN  how to start ranks
set -eu
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
. dev/bench/options.sh

tp='2 4' at='1 10 20 40'
take_options "--tp --at" "$@"
eval "set -- $others"
most=1 steps=1
for t in $tp $at; do case $t in ''|*[!0-9]*|0*) fail "--tp and --at want whole numbers from 1 on, not '$t'" ;; esac; done
for t in $tp; do [ "$t" -le "$most" ] || most=$t; done
for s in $at; do [ "$s" -le "$steps" ] || steps=$s; done
build=${BUILD:-build}
folder() { if [ "$1" = fp32 ]; then echo "$build"; else echo "$build/$1"; fi; }
for precision in fp32 bf16; do
    for program in single tp; do
        [ -x "$(folder $precision)/train_gpt2_$program" ] ||
            fail "there is no $(folder $precision)/train_gpt2_$program; make PRECISION=$precision train_gpt2_$program"
    done
done
ranks_can_start "$most"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# run NAME PRECISION RANKS PROGRAM OPTION...: leaves "STEP LOSS NORM" of each step in $work/NAME.
run() {
    name=$1 ranks=$3 program=$(folder "$2")/train_gpt2_$4
    shift 4
    rm -rf "$work/out"
    set -- "$program" --data test/reference/tokens.bin --val-data= --model d4 --channels 128 --seq-len 64 --batch-size 8 \
        --deterministic --eval-every 0 --sample-every 0 "$@" --steps "$steps" --out "$work/out"
    [ "$ranks" = 1 ] || set -- on_ranks "$ranks" "$@"
    OMP_NUM_THREADS=1 "$@" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; fail "$name failed"; }
    sed -n 's/^{"step":\([0-9]*\),"loss":\([-+0-9.eE]*\),"grad_norm":\([-+0-9.eE]*\).*/\1 \2 \3/p' "$work/out/metrics.jsonl" >"$work/$name"
    echo "  $name" >&2
}
# line TITLE NAME OF
line() {
    printf '| %s |' "$1"
    for s in $at; do
        awk -v step="$s" '
            function more(most, a, b) { a = a / b - 1; if (a < 0) a = -a; return a > most ? a : most }
            function shown(x) { return x == 0 ? "0" : sprintf("%.0e", x) }
            $1 > step { next }
            FNR == NR { loss[$1] = $2; norm[$1] = $3; next }
            { losses = more(losses, $2, loss[$1]); norms = more(norms, $3, norm[$1]) }
            END { printf " %s / %s |", shown(losses), shown(norms) }' "$work/$3" "$work/$2"
    done
    echo
}
for precision in fp32 bf16; do
    run "$precision" "$precision" 1 single "$@"
    for t in $tp; do run "$precision-$t" "$precision" "$t" tp "$@"; done
done
wide=
"$build/bf16/train_gpt2_tp" --help | grep -q -e '--tp-reduce-dtype' && wide=yes
if [ -n "$wide" ]; then for t in $tp; do run "wide-$t" bf16 "$t" tp --tp-reduce-dtype fp32 "$@"; done; fi

printf '| loss / gradient norm |'
for s in $at; do if [ "$s" = 1 ]; then printf ' step 1 |'; else printf ' up to step %s |' "$s"; fi; done
printf '\n|---|'
for s in $at; do printf '%s' '---|'; done
echo
for precision in fp32 bf16; do
    for t in $tp; do line "$precision, $t ranks" "$precision-$t" "$precision"; done
done
if [ -n "$wide" ]; then for t in $tp; do line "bf16, $t ranks, \`--tp-reduce-dtype fp32\`" "wide-$t" bf16; done; fi
line "bf16 against fp32, one device" bf16 fp32
