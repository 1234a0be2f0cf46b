#!/bin/sh
# bench.sh - how fast a step of GPT-2 124M is, B=4, compared with the machine's peak and with other programs.
#
#   make bench
#   PYTHON=venv/bin/python LLMC=~/llm.c make bench      with both peers
#   BENCH_STEPS=2 BENCH_ROUNDS=1 BENCH_T1024=0 make bench     a quick look
#
# PYTHON        a Python that has torch (default python3)
# LLMC          a checkout of llm.c; its train_gpt2.c is built in our build folder, and nothing is written into the checkout
# BENCH_STEPS   timed steps a round (default 6; at T=1024 a third of it), BENCH_ROUNDS rounds (default 3)
# BENCH_T1024=0 leaves out the long sequences
# MPIRUN        starts the two ranks that show how much communication DDP's and FSDP's modes leave exposed (dev/on_ranks.sh)
#
# Every program starts from random weights, on random tokens; their steps are timed from outside by one clock
# (dev/bench/measure.c). They take turns, round after round, so that a machine that slows down slows all of them.
set -eu
cd "$(dirname -- "$0")/../.."
build=${BUILD:-build}
python=${PYTHON:-python3}
steps=${BENCH_STEPS:-6} rounds=${BENCH_ROUNDS:-3} long=${BENCH_T1024:-1}
fail() { echo "error: $*" >&2; exit 1; }
case ${1-} in -h|--help) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit ;; esac
for number in "$steps" "$rounds" "$long"; do
    case $number in ''|*[!0-9]*) fail "BENCH_STEPS, BENCH_ROUNDS and BENCH_T1024 must be whole numbers, not '$number'" ;; esac
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
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
"$tools/inputs" tokens "$work/tokens.bin"

programs='' absent=''
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
# run PROGRAM T WARMUP STEPS: adds "PROGRAM T ms|rss VALUE" lines to the results.
run() {
    program=$1 T=$2 warmup=$3 count=$4
    case $program in
        ours-fp32)  ours "$build/train_gpt2_single" ;;
        ours-bf16)  ours "$build/bf16/train_gpt2_single" ;;
        torch-*)    timed "$python" dev/bench/pytorch_gpt2.py "${program#torch-}" 4 "$T" ;;
        llmc-fp32)  [ "$count" -le 7 ] || count=7 # it validates before every tenth step
                    (cd "$work" && timed stdbuf -oL "$tools/llmc") ;;
    esac >"$work/measured" || { echo "  $program failed at T=$T" >&2; return; }
    sed "s/^/$program $T /" "$work/measured" >>"$work/results"
    echo "  $program, T=$T: $(awk '$1 == "ms" { printf "%s%.0f", sep, $2; sep = " " }' "$work/measured") ms" >&2
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

. dev/bench/busy.sh
busiest=0 round=1
while [ "$round" -le "$rounds" ]; do
    echo "round $round of $rounds" >&2
    busy=$(busy_percent)
    if [ "$busy" -gt "$busiest" ]; then busiest=$busy; fi
    "$tools/peak" | sed 's/^/peak 0 /' >>"$work/results"
    for program in $programs; do run "$program" 64 2 "$steps"; done
    if [ "$long" != 0 ]; then
        for program in ours-fp32 ${torch:+torch-fp32}; do run "$program" 1024 1 $(((steps + 2) / 3)); done
    fi
    if [ -n "$ranks" ]; then BUILD=$build sh dev/bench/exposed.sh "$steps" >>"$work/results"; fi
    round=$((round + 1))
done

# --- the table ---
threads=$(nproc 2>/dev/null || echo "?")
echo
echo "GPT-2 124M, B=4, $threads threads. Medians; rounds: $rounds, steps a round: $steps, at T=1024: $(((steps + 2) / 3))"
awk -f dev/bench/median.awk -f dev/bench/table.awk "$work/results"
if [ "$busiest" -gt 5 ]; then printf '\nOther programs used up to %s %% of this machine before a round: do not trust these figures.\n' "$busiest"; fi
if [ "$long" != 0 ] && [ -n "${LLMC-}" ]; then lacks "llm.c at T=1024: its program is fixed at T=64"; fi
if [ -n "$absent" ]; then printf '\nNot measured\n%s' "$absent"; fi
