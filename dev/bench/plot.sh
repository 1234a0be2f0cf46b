#!/bin/sh
# plot.sh - plots the loss over the steps of one run, or of several to compare: as a PNG, and in the terminal.
#
#   sh dev/bench/plot.sh OUT/metrics.jsonl... [PLOT.png]
#
# Each run is named by its folder. Without a PLOT.png, loss.png is made beside the first file.
set -eu
usage() { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }

png=
for last in "$@"; do :; done
case "${last-}" in
    ''|-h|--help) usage $(($# == 0)) ;;
    *.png) png=$last ;;
esac
if [ -n "$png" ] && [ $# -eq 1 ]; then fail "no metrics.jsonl was given, only the picture to make"; fi
command -v gnuplot >/dev/null || fail "gnuplot is missing; sh dev/setup.sh installs it"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# numbers KEY FILE: prints "step value" for every line that has both. A null, a torn last line and the run's own line do not.
numbers() {
    awk -v key="\"$1\"" '
        function number(name,   text) {
            if (!match($0, name "[ ]*:[ ]*-?[0-9][-+0-9.eE]*[ ]*[,}]")) return ""
            text = substr($0, RSTART, RLENGTH - 1)
            sub(/^[^:]*:[ ]*/, "", text)
            return text
        }
        /^[ ]*{"run"/ { next }
        { step = number("\"step\""); value = number(key); if (step != "" && value != "") print step, value }' "$2"
}

# A run is named in the key by its folder. Inside single quotes, gnuplot wants a single quote doubled.
run_name() {
    folder=$(basename "$(cd "$(dirname "$1")" && pwd)")
    printf '%s' "$folder" | sed "s/'/''/g"
}

# add_curve RUN SERIES STYLE MARK: adds a curve to both pictures. The terminal's has marks instead of lines and colours.
add_curve() {
    title="title '$name: $2'"
    picture="${picture:+$picture, }'$work/$1.$2' with $3 lc $1 $title"
    terminal="${terminal:+$terminal, }'$work/$1.$2' with points pt '$4' $title"
}
mark() { printf '%s' "$1" | cut -c $(((count - 1) % ${#1} + 1)); }

count=0 picture='' terminal=''
for file in "$@"; do
    [ "$file" != "$png" ] || continue
    [ -r "$file" ] || fail "$file cannot be read; expected the metrics.jsonl that a run writes into its --out folder"
    count=$((count + 1))
    numbers loss "$file" >"$work/$count.training"
    numbers val_loss "$file" >"$work/$count.validation"
    [ -s "$work/$count.training" ] || [ -s "$work/$count.validation" ] ||
        fail "$file has no losses; expected lines like {\"step\":1,\"loss\":5.5} or {\"step\":1,\"val_loss\":5.5}"
    name=$(run_name "$file")
    if [ -s "$work/$count.training" ]; then add_curve $count training "lines lw 1" "$(mark '.:,~-')"; fi
    if [ -s "$work/$count.validation" ]; then add_curve $count validation "linespoints lw 2 pt 7" "$(mark 'ox+*#')"; fi
    [ -n "$png" ] || png=$(dirname "$file")/loss.png
done

width=79
if [ -t 1 ]; then width=$(stty size 2>/dev/null </dev/tty | awk '$2 > 20 { print $2 - 1 }' | grep . || echo 79); fi

# style TERMINAL: prints the settings that both pictures share.
style() {
    echo "set terminal $1"
    echo "set encoding utf8; set key top right; set xlabel 'step' noenhanced; set ylabel 'loss, nats per token' noenhanced"
}
case $png in *\'*) fail "the name of the picture must have no single quote: $png" ;; esac
{
    style "pngcairo size 1000,600 noenhanced"
    echo "set grid; set output '$png'; plot $picture; unset output"
} >"$work/picture.gp"
{
    style "dumb size $width,24 noenhanced"
    echo "unset ylabel; plot $terminal"
} >"$work/terminal.gp"
gnuplot "$work/picture.gp" >"$work/log" 2>&1 || fail "$png was not made: $(grep . "$work/log" | tail -n 1)"
gnuplot "$work/terminal.gp"
echo "plot: $png"
