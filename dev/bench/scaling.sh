#!/bin/sh
# scaling.sh - how much faster more ranks are: a training program on 1, 2 and 4 of them, as a table and a plot.
#
#   sh dev/bench/scaling.sh [--ranks "1 2 4"] [--batch-size 8] [--steps 12] [--out FOLDER] [OPTION OF THE PROGRAM...]
#
# strong   the batch of a step stays as it is (--batch-size sequences for each of the most ranks) and is divided among them
# weak     every rank has --batch-size sequences a step, so that more ranks do more work
#
# All other options are the program's: --model gpt2 --seq-len 1024, --ddp naive, ... Tokens per second and the share of a step in
# which nothing was computed for want of gradients are rank 0's medians over the steps, without the first. Efficiency is the
# speed-up over what the number of ranks would give at best. --out keeps each run's folder and log, and scaling.png.
#
# OMP_NUM_THREADS  threads of a rank (default 1, for one rank as for many, or there would be nothing to compare with)
# PROGRAM          default ./train_gpt2_ddp    MPIRUN  how to start ranks (dev/on_ranks.sh)
set -eu
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,16s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. dev/bench/options.sh

ranks='1 2 4' batch_size=8 steps=12 out=''
take_options "--ranks --batch-size --steps --out" "$@"
eval "set -- $others"
for number in $ranks "$batch_size" "$steps"; do
    case $number in ''|*[!0-9]*|0*) fail "--ranks, --batch-size and --steps want whole numbers from 1 on, not '$number'" ;; esac
done
least=0 most=0
for N in $ranks; do
    [ "$least" -gt 0 ] || least=$N
    [ "$N" -gt "$most" ] || fail "--ranks must grow: '$ranks'"
    most=$N
done
[ "$most" -gt 0 ] || fail "--ranks is empty"
[ "$steps" -ge 2 ] || fail "--steps must be at least 2: the first is not counted"
for N in $ranks; do
    [ $((batch_size * most % N)) = 0 ] || fail "a batch of $batch_size x $most sequences does not divide over $N ranks; give another --batch-size"
done
program=${PROGRAM:-./train_gpt2_ddp}
[ -x "$program" ] || fail "there is no $program; make ${program##*/}"
. dev/on_ranks.sh
ranks_can_start "$most"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cores=$(getconf _NPROCESSORS_ONLN) # nproc would heed OMP_NUM_THREADS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
folder=${out:-$work}
mkdir -p "$folder"

# median KEY FILE: of the steps' values, without the first.
median() {
    sed -n "s/^{\"step\":[0-9]*,\"loss\".*\"$1\":\([-+0-9.eE]*\).*/\1/p" "$2" | tail -n +2 | sort -g |
        awk '{ x[NR] = $1 } END { if (NR == 0) exit 1; print NR % 2 ? x[(NR + 1) / 2] : (x[NR / 2] + x[NR / 2 + 1]) / 2 }'
}
# run KIND N SEQUENCES OPTION...: one run, SEQUENCES on each rank; adds a line "N tokens/s step_ms exposed_ms" to the results.
run() {
    kind=$1 N=$2 sequences=$3 into=$folder/$1_$2
    shift 3
    rm -rf "$into"
    mkdir -p "$into"
    echo "$kind, $N rank(s) ..." >&2
    on_ranks "$N" "$program" --val-data= --sample-every 0 "$@" --batch-size "$sequences" --steps "$steps" \
        --out "$into" > "$into/log" 2>&1 || { tail -n 20 "$into/log" >&2; fail "$kind on $N ranks failed"; }
    rm -rf "$into"/step_*
    echo "$N $(median tokens_per_s "$into/metrics.jsonl") $(median step_ms "$into/metrics.jsonl")" \
        "$(median comm_exposed_ms "$into/metrics.jsonl")" >> "$work/$kind"
}
. dev/bench/busy.sh
busy=$(busy_percent)
for N in $ranks; do
    run strong "$N" $((batch_size * most / N)) "$@"
    if [ "$N" = "$most" ]; then tail -n 1 "$work/strong" >> "$work/weak"; else run weak "$N" "$batch_size" "$@"; fi # the same, there
done

table() {
    echo "ranks    tokens/s  speed-up  efficiency  exposed"
    awk -v points="$1.points" '
        NR == 1 { ranks = $1; speed = $2 }
        { printf "%5d %11.0f %9.2f %9.0f %% %6.0f %%\n", $1, $2, $2 / speed, 100 * $2 / speed / ($1 / ranks), 100 * $4 / $3
          print $1, $2 / speed > points }' "$1"
}
printf '\nstrong: %d sequences a step, divided among the ranks\n' $((batch_size * most))
table "$work/strong"
printf '\nweak: %d sequences a step on every rank\n' "$batch_size"
table "$work/weak"
if [ $((most * OMP_NUM_THREADS)) -gt "$cores" ] && grep -q '^device  *CPU' "$folder/strong_$most/log"; then
    printf '\nThis machine has %d cores. Ranks x %d thread(s) beyond that take turns: they cannot gain.\n' "$cores" "$OMP_NUM_THREADS"
fi
if [ "$busy" -gt 5 ]; then printf '\nOther programs used %s %% of this machine before the first run: do not trust these figures.\n' "$busy"; fi

command -v gnuplot >/dev/null || { echo "no plot: gnuplot is missing; sh dev/setup.sh installs it"; exit 0; }
case $folder in *\'*) fail "the name of --out must have no single quote: $folder" ;; esac
# plot TERMINAL SETTINGS STYLE-OF-IDEAL STYLE-OF-STRONG STYLE-OF-WEAK
plot() {
    echo "set terminal $1; set encoding utf8; set key top left; set xlabel 'ranks' noenhanced; set ylabel 'speed-up' noenhanced"
    echo "set xrange [0:$most + 0.5]; set yrange [0:$most / $least.0 + 0.5]; $2"
    echo "plot x / $least title 'ideal' $3, '$work/strong.points' title 'strong' $4, '$work/weak.points' title 'weak' $5"
}
plot "pngcairo size 800,500 noenhanced" "set grid; set output '$folder/scaling.png'" "with lines dt 2" "with linespoints pt 7" \
    "with linespoints pt 5" > "$work/picture.gp"
plot "dumb size 79,24 noenhanced" "unset ylabel" "with dots" "with points pt 's'" "with points pt 'w'" > "$work/terminal.gp"
gnuplot "$work/picture.gp" > "$work/log" 2>&1 || fail "$folder/scaling.png was not made: $(grep . "$work/log" | tail -n 1)"
gnuplot "$work/terminal.gp"
[ -z "$out" ] || echo "plot: $folder/scaling.png"
