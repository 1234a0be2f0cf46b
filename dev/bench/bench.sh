#!/bin/sh
# bench.sh - how fast a step of GPT-2 124M is, B=4, compared with the machine's peak and with other programs.
#
#   make bench
#   PYTHON=venv/bin/python LLMC=~/llm.c make bench      with both peers
#   BENCH_STEPS=2 BENCH_ROUNDS=1 BENCH_T1024=0 make bench     a quick look
#
# PYTHON        a Python that has torch (default python3)
# LLMC          a checkout of llm.c; its train_gpt2.c is built in our build folder, and nothing is written into the checkout
# BENCH_STEPS   timed steps a round (default 6; at T=1024 a third of it), BENCH_ROUNDS at most so many rounds (default 3)
# BENCH_SECONDS every program is measured once at T=64; what else would end later than this is left out (default 240)
# BENCH_T1024=0 leaves out the long sequences
# MPIRUN        starts the two ranks that show how much communication DDP's and FSDP's modes leave exposed (dev/on_ranks.sh)
#
# Every program starts from random weights, on random tokens; their steps are timed from outside by one clock
# (dev/bench/measure.c). They take turns, round after round, so that a machine that slows down slows all of them. A program's row
# is printed when it has been measured, and the table at the end also where a run is interrupted.
set -eu
cd "$(dirname -- "$0")/../.."
build=${BUILD:-build}
python=${PYTHON:-python3}
steps=${BENCH_STEPS:-6} rounds=${BENCH_ROUNDS:-3} long=${BENCH_T1024:-1} limit=${BENCH_SECONDS:-240}
fail() { echo "error: $*" >&2; exit 1; }
case ${1-} in -h|--help) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit ;; esac
for number in "$steps" "$rounds" "$long" "$limit"; do
    case $number in ''|*[!0-9]*) fail "BENCH_STEPS, BENCH_ROUNDS, BENCH_SECONDS and BENCH_T1024 must be whole numbers, not '$number'" ;; esac
done
[ "$steps" -ge 1 ] && [ "$rounds" -ge 1 ] || fail "BENCH_STEPS and BENCH_ROUNDS must be at least 1"

# --- the tools, and what there is to measure ---
mkdir -p "$build/bench"
tools=$(cd "$build/bench" && pwd)
for tool in peak measure inputs; do
    ${CC:-cc} -std=c11 -O3 -march=native -ffp-contract=off -fopenmp "dev/bench/$tool.c" -o "$tools/$tool" ${LDFLAGS-} -ldnnl -lm ||
        fail "dev/bench/$tool.c cannot be built; make doctor lists what is missing"
done
work=$(mktemp -d "$tools/run.XXXXXX")
: >"$work/results"
trap 'rm -rf "$work"' EXIT
exec 3>&1 # a trap runs wherever the shell is, also where its output goes to a file
trap 'echo "interrupted" >&2; print_table >&3; exit 1' HUP INT TERM
"$tools/inputs" tokens "$work/tokens.bin"

programs='' absent='' finished=0 busiest=0
add() { programs="$programs $1"; }
lacks() { absent="$absent  $1
"; }
[ -x "$build/train_gpt2_single" ] || fail "there is no $build/train_gpt2_single; make bench builds it"
add ours-fp32
if "$python" -c 'import torch' 2>/dev/null; then torch=yes; add torch-fp32; else
    torch=
    lacks "PyTorch: $python has no torch. python3 -m venv venv && venv/bin/pip install torch, then PYTHON=venv/bin/python make bench"
fi
# llm.c's program reads files of fixed names in the folder it runs in. The flags are those of its own Makefile.
if [ -z "${LLMC-}" ]; then lacks "llm.c: LLMC is not set. git clone https://github.com/karpathy/llm.c, then LLMC=llm.c make bench"
elif ! command -v stdbuf >/dev/null; then lacks "llm.c: there is no stdbuf (coreutils), without which its lines arrive late"
else
    [ -r "$LLMC/train_gpt2.c" ] || fail "LLMC=$LLMC has no train_gpt2.c; it must be a checkout of llm.c"
    ${CC:-cc} -Ofast -march=native -fopenmp -DOMP -w "$LLMC/train_gpt2.c" -o "$tools/llmc" -lm || fail "$LLMC/train_gpt2.c cannot be built"
    data=$work/dev/data/tinyshakespeare
    mkdir -p "$data"
    ln "$work/tokens.bin" "$data/tiny_shakespeare_train.bin"
    ln "$work/tokens.bin" "$data/tiny_shakespeare_val.bin"
    echo "making random weights for llm.c ..." >&2
    "$tools/inputs" llmc "$work/gpt2_124M.bin"
    add llmc-fp32
fi
if [ ! -x "$build/bf16/train_gpt2_single" ]; then lacks "ours in bf16: there is no $build/bf16/train_gpt2_single; make bench builds it"
elif "$tools/peak" bf16 | grep -q '^bf16 0'; then lacks "bf16: this processor has no instructions for it"
else
    add ours-bf16
    if [ -n "$torch" ]; then add torch-bf16; fi
fi

ranks=yes
if [ ! -x "$build/train_gpt2_ddp" ] || [ ! -x "$build/train_gpt2_fsdp" ]; then
    ranks=; lacks "two ranks: there is no $build/train_gpt2_ddp or no $build/train_gpt2_fsdp; make bench builds them where MPI is"
elif [ "$(getconf _NPROCESSORS_ONLN)" -lt 2 ]; then ranks=; lacks "two ranks: they need two cores to overlap anything"
fi

# --- measuring ---
begin=$(date +%s)
elapsed() { echo $(($(date +%s) - begin)); }
long_steps=$(((steps + 2) / 3))

# run PROGRAM T WARMUP STEPS: adds "PROGRAM T ms|rss VALUE" lines to the results.
run() {
    program=$1 T=$2 warmup=$3 count=$4
    case $program in
        ours-fp32)  ours "$build/train_gpt2_single" ;;
        ours-bf16)  ours "$build/bf16/train_gpt2_single" ;;
        torch-*)    timed "$python" dev/bench/pytorch_gpt2.py "${program#torch-}" 4 "$T" ;;
        llmc-fp32)  [ "$count" -le 7 ] || count=7 # it validates before every tenth step
                    (cd "$work" && timed stdbuf -oL "$tools/llmc") ;;
    esac >"$work/measured" || { echo "  $program failed at T=$T" >&2; return 0; }
    sed "s/^/$program $T /" "$work/measured" >>"$work/results"
    awk -v "only=$program $T" -f dev/bench/median.awk -f dev/bench/table.awk "$work/results" >&2
}
# if_time NAME SECONDS COMMAND...: runs it if it is likely to end in time. It takes as long as last time, or SECONDS.
if_time() {
    name=$1 expected=$2 now=$(elapsed)
    shift 2
    if [ -e "$work/took.$name" ]; then expected=$(cat "$work/took.$name"); fi
    if [ $((now + expected)) -gt "$limit" ]; then
        [ -e "$work/took.$name" ] || lacks "$name: it would take about $expected s more than $now s, and BENCH_SECONDS is $limit"
        return 0
    fi
    "$@"
    echo $(($(elapsed) - now)) >"$work/took.$name"
}
# Seconds of N steps of a program at T=1024: 16 times the tokens, and attention.
long_seconds() {
    awk -v program="$1" -v n="$2" '$1 == program && $2 == 64 && $3 == "ms" { ms = $4 } END { printf "%d", 1 + n * 18 * ms / 1000 }' "$work/results"
}
# A launcher that is missing costs these rows, not the others.
measure_ranks() {
    BUILD=$build sh dev/bench/exposed.sh "$steps" >>"$work/results" || lacks "two ranks: dev/bench/exposed.sh failed"
}
timed() { "$tools/measure" "$warmup" "$count" "$@"; }
# --steps is far more than are timed: measure stops the program after the timed steps, before it saves anything.
ours() {
    timed "$1" --data "$work/tokens.bin" --val-data '' --model gpt2 --recompute none --batch-size 4 --seq-len "$T" --steps 1000000 \
        --eval-every 0 --sample-every 0 --out "$work/out" || return 1
    awk '/"predicted_bytes"/ { sub(/.*"predicted_bytes" *: *{/, ""); sub(/}.*/, ""); n = split($0, part, /[:,]/)
                               for (i = 2; i <= n; i += 2) sum += part[i]; printf "predicted %.0f\n", sum }
         match($0, /"mem_peak_bytes" *: *[0-9]+/) { counted = substr($0, RSTART, RLENGTH); sub(/.*: */, "", counted) }
         END { print "counted", counted }' "$work/out/metrics.jsonl"
}


threads=$(nproc 2>/dev/null || echo "?")
print_table() {
    echo
    echo "GPT-2 124M, B=4, $threads threads. Medians; finished rounds: $finished, steps a round: $steps, at T=1024: $long_steps"
    awk -f dev/bench/median.awk -f dev/bench/table.awk "$work/results"
    if [ "$busiest" -gt 5 ]; then printf '\nOther programs used up to %s %% of this machine before a round: do not trust these figures.\n' "$busiest"; fi
    if [ "$long" != 0 ] && [ -n "${LLMC-}" ]; then lacks "llm.c at T=1024: its program is fixed at T=64"; fi
    if [ -n "$absent" ]; then printf '\nNot measured\n%s' "$absent"; fi
}

. dev/bench/busy.sh
finished=0
while [ $finished -lt "$rounds" ]; do
    # A first round is measured whatever it takes.
    if [ $finished -gt 0 ] && [ $(($(elapsed) + $(cat "$work/took.round"))) -gt "$limit" ]; then break; fi
    echo "round $((finished + 1)) of at most $rounds" >&2
    round_begin=$(elapsed)
    busy=$(busy_percent)
    if [ "$busy" -gt "$busiest" ]; then busiest=$busy; fi
    "$tools/peak" | sed 's/^/peak 0 /' >>"$work/results"
    for program in $programs; do run "$program" 64 2 "$steps"; done
    echo $(($(elapsed) - round_begin)) >"$work/took.round"
    if [ -n "$ranks" ]; then if_time "two ranks" 40 measure_ranks; fi
    if [ "$long" != 0 ]; then
        for program in ours-fp32 ${torch:+torch-fp32}; do
            if_time "$program at T=1024" "$(long_seconds $program $((long_steps + 1)))" run "$program" 1024 1 $long_steps
        done
    fi
    finished=$((finished + 1))
done
print_table
