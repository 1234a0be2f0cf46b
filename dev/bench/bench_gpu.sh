#!/bin/sh
# bench_gpu.sh - how fast a step of GPT-2 is on a GPU in bf16, against llm.c and PyTorch: same model, batch and sequence length.
#
#   sh dev/bench/bench_gpu.sh [--model gpt2] [--batch 16,32] [--seq-len 1024] [--rounds 3] [--steps 20] [--llmc PATH] [--out DIR]
#
# --model    gpt2 is 124M; gpt2-xl, 1.5B, also with recomputation and under FSDP; --batch: sequences a step, a table for each
# --llmc     llm.c's train_gpt2cu or the folder that has it, built there with cuDNN's attention (its README says what that needs):
#            make train_gpt2cu USE_CUDNN=1 NO_MULTI_GPU=1 NO_USE_MPI=1. Without this option or LLMC, llm.c is left out
# --out      folder for the programs' logs, all results and table.md (build/bench_gpu)
# PYTHON     a Python whose torch sees the GPU (python3); without one PyTorch is left out
# BUILD      where our programs are (build/cuda-bf16): make DEVICE=cuda PRECISION=bf16 programs build/cuda-bf16/bench_layers
#
# Programs start from random weights, on random tokens; their steps are timed from outside by one clock (dev/bench/measure.c).
# They take turns, round after round, so that a GPU that slows down slows all of them; medians count. llm.c has a row for each
# setting worth trying. PyTorch has two, because neither is what our programs do: fp32 weights under autocast, and bf16 with no
# master copy. MFU counts the same 6 N + 6 L C T FLOPs a token for every program (N: all parameters, without the vocabulary's
# padding; attention's causal half), over the data sheet's rate; the next column is the share of a large product's measured rate.
# Recomputed FLOPs do not count. The status is 1 if one of our programs failed; if a peer failed, its row says why.
set -eu
here=$(pwd)
cd "$(dirname -- "$0")/../.."
fail() { echo "error: $*" >&2; exit 1; }
model=gpt2 batches=32 T=1024 rounds=3 steps=20 llmc=${LLMC-} out=build/bench_gpu
build=${BUILD:-build/cuda-bf16} python=${PYTHON:-python3} warmup=5 limit=${BENCH_SECONDS:-300}
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,20s/^# \{0,1\}//p' "$0"; exit ;;
        --*) [ $# -ge 2 ] || fail "$1 needs a value; --help lists the options" ;;
    esac
    case $1 in
        --model) model=$2 ;;
        --batch) batches=$(echo "$2" | tr , ' ') ;;
        --seq-len) T=$2 ;;
        --rounds) rounds=$2 ;;
        --steps) steps=$2 ;;
        --llmc) llmc=$2; case $llmc in /*) ;; *) llmc=$here/$llmc ;; esac ;;
        --out) out=$2; case $out in /*) ;; *) out=$here/$out ;; esac ;;
        *) fail "there is no option '$1'; --help lists them" ;;
    esac
    shift 2
done
number() { # NAME VALUE LEAST
    case $2 in ''|*[!0-9]*|??????????*) fail "$1 must be a whole number, not '$2'" ;; esac
    [ "$2" -ge "$3" ] || fail "$1 must be at least $3, not $2"
}
case $batches in *[!\ ]*) ;; *) fail "--batch must be a list of whole numbers, not '$batches'" ;; esac
for B in $batches; do number --batch "$B" 1; done
number --seq-len "$T" 1; number --rounds "$rounds" 1; number --steps "$steps" 1; number BENCH_SECONDS "$limit" 1
# Layers and channels, from which the table's FLOPs and parameters follow.
case $model in
    gpt2) sizes="12 768" ;; gpt2-medium) sizes="24 1024" ;; gpt2-large) sizes="36 1280" ;; gpt2-xl) sizes="48 1600" ;;
    d[1-9]|d[1-9][0-9]) sizes="${model#d} $((64 * ${model#d}))" ;;
    *) fail "there is no model '$model'; there are gpt2, gpt2-medium, gpt2-large, gpt2-xl and dN" ;;
esac
for program in train_gpt2_single bench_layers; do
    [ -x "$build/$program" ] || fail "there is no $build/$program: make DEVICE=cuda PRECISION=bf16 build/cuda-bf16/$program"
done

# --- what there is to measure ---
mkdir -p "$out" && out=$(cd "$out" && pwd) || fail "$out cannot be made; --out names another folder"
build=$(cd "$build" && pwd)
work=$(mktemp -d)
sampler=''
end_sampler() { # KILL, because a shell that has just been forked and is not nvidia-smi yet may lose a TERM
    if [ -n "$sampler" ]; then kill -KILL "$sampler" 2>/dev/null || true; wait "$sampler" 2>/dev/null || true; fi
    sampler=''
}
trap 'end_sampler; rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
for tool in measure inputs; do
    ${CC:-cc} -std=c11 -O3 -fopenmp "dev/bench/$tool.c" -o "$work/$tool" -lm || fail "dev/bench/$tool.c cannot be built"
done
"$work/inputs" tokens "$work/tokens.bin"
rm -f "$out"/*.log "$out/results"

programs=ours absent=''
lacks() { absent="$absent
- $1"; }
if [ "$model" != gpt2 ]; then
    programs="$programs ours-recompute"
    if [ -x "$build/train_gpt2_fsdp" ]; then programs="$programs ours-fsdp ours-fsdp-recompute"
    else lacks "FSDP on one rank: there is no $build/train_gpt2_fsdp, which needs MPI and NCCL to be built"; fi
fi
if [ -d "$llmc" ]; then llmc=$llmc/train_gpt2cu; fi
if [ -z "$llmc" ]; then lacks "llm.c: neither --llmc nor LLMC says where its train_gpt2cu is"
elif [ ! -x "$llmc" ]; then
    fail "there is no program $llmc; in llm.c's folder: make train_gpt2cu USE_CUDNN=1 NO_MULTI_GPU=1 NO_USE_MPI=1"
elif ! command -v stdbuf >/dev/null; then lacks "llm.c: there is no stdbuf (coreutils), without which its lines arrive late"
else
    llmc=$(cd "$(dirname "$llmc")" && pwd)/${llmc##*/}
    "$work/inputs" llmc "$work/model.bin" "$model" bf16
    for setting in 0-r0 1-r0 2-r0 0-r1 2-r1; do programs="$programs llmc-ge$setting"; done
    ldd "$llmc" 2>/dev/null | grep -q cudnn ||
        lacks "llm.c with cuDNN: $llmc was built without it, so its own kernels compute attention. Build it with USE_CUDNN=1"
fi
if "$python" -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; then
    programs="$programs torch-autocast torch-bf16"
else lacks "PyTorch: $python has no torch that sees a GPU; PYTHON names another"; fi
gpu=${CUDA_VISIBLE_DEVICES:-0}
memory_used="nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i ${gpu%%,*}"
held=$($memory_used 2>/dev/null || true)
case $held in ''|*[!0-9]*) held=; lacks "memory as nvidia-smi sees it: it does not answer" ;; esac
[ "${held:-0}" -lt 1000 ] || echo "another program holds $held MiB of this GPU: do not trust these figures" >&2

# --- measuring ---
# run PROGRAM B ROUND: adds "PROGRAM B ms|counted|used|failed VALUE" lines to the results.
run() {
    name=$1 B=$2 log=$out/$1-B$2-$3.log status=0
    if [ -n "$held" ]; then $memory_used -lms 100 >"$work/used" 2>/dev/null & sampler=$!; fi
    (cd "$work" && start "$1" "$2") >"$work/measured" 2>"$work/stderr" || status=$?
    end_sampler
    cat "$work/stderr" >>"$log"
    if [ $status -ne 0 ]; then
        why=$(last_words <"$log")
        if [ $status -eq 124 ]; then why="not done after $limit s"; fi
        echo "$name $B failed $why" >>"$out/results"
        echo "  $name, B=$B failed: $why" >&2
        return
    fi
    counted <"$log" >>"$work/measured"
    if [ -n "$held" ]; then sort -n "$work/used" | awk 'END { print "used", $1 * 1048576 }' >>"$work/measured"; fi
    sed -n "/^rss/!s/^/$name $B /p" "$work/measured" >>"$out/results"
    echo "  $name, B=$B: $(awk '$1 == "ms" { printf "%s%.1f", sep, $2; sep = " " }' "$work/measured") ms" >&2
}
# The last line of the log that mentions an error, with the next line if it ends in a colon, or else the last line. measure's own
# words, which come after them, are left out.
last_words() {
    awk '/ended after .* its last words:$/ { exit } NF { last = $0 } goes_on { error = error " " $0; goes_on = 0; next }
         tolower($0) ~ /error|out of memory|assert/ { error = $0; goes_on = /:$/ }
         END { print substr(error ? error : last, 1, 150) }' | tr '|' '/'
}
start() {
    case $1 in
        ours) ours train_gpt2_single --recompute none ;;
        ours-recompute) ours train_gpt2_single --recompute block ;;
        ours-fsdp) ours train_gpt2_fsdp --recompute none ;;
        ours-fsdp-recompute) ours train_gpt2_fsdp --recompute block ;;
        llmc-*) ge=${1#llmc-ge} # it validates at its first step, and would at the last
                timed stdbuf -oL "$llmc" -i tokens.bin -j tokens.bin -e model.bin -b "$B" -t "$T" -x 1000000 -v 1000000 -m 1 \
                    -s 0 -l 0.0001 -c 0.1 -ge "${ge%-r*}" -r "${ge#*-r}" ;;
        torch-*) timed "$python" "$OLDPWD/dev/bench/pytorch_cuda.py" compile "${1#torch-}" "$model" "$B" "$T" ;;
    esac
}
# --steps is far more than are timed: measure stops the program after the timed steps. The time limit's signal goes to measure,
# and the program dies with it.
timed() { timeout --foreground "$limit" ./measure --log "$log" "$warmup" "$steps" "$@"; }
ours() {
    program=$1
    shift
    timed "$build/$program" --data tokens.bin --val-data '' --model "$model" --vocab-size 50257 --batch-size "$B" --seq-len "$T" \
        --steps 1000000 --eval-every 0 --sample-every 0 "$@"
}
# The memory that a program reports: ours all that it has allocated, PyTorch the peak of all tensors, llm.c all in use on the GPU.
counted() {
    awk 'BEGIN { unit["B"] = 1; unit["kB"] = 1e3; unit["MB"] = 1e6; unit["GB"] = 1e9; unit["TB"] = 1e12 }
         /^step .*mem [0-9.]+ [kMGT]?B/ { sub(/.*mem /, ""); bytes = $1 * unit[$2] }
         /^device memory usage: [0-9]+ MiB/ { bytes = $4 * 1048576 }
         END { if (bytes) printf "counted %.0f\n", bytes }'
}

# --- the tables, which are also printed when a time limit ends this script ---
tables() {
    echo "### $model in bf16, T=$T: whole steps; rounds: $rounds${1-}, steps a round: $steps"
    awk -v model="$model" -v T="$T" -v programs="$programs" -v batches="$batches" -v sizes="$sizes" \
        -f dev/bench/median.awk -f dev/bench/gpu_table.awk "$out/results"
    if [ -n "$absent" ]; then printf '\nNot measured:\n%s\n' "$absent"; fi
}
trap 'end_sampler; tables ", stopped in round $round" | tee "$out/table.md"; exit 1' TERM

round=1
while [ "$round" -le "$rounds" ]; do
    echo "round $round of $rounds" >&2
    "$build/bench_layers" --peaks >"$work/peaks" || fail "$build/bench_layers --peaks failed"
    # peaks: copy X GB/s, product Y TFLOP/s, data sheet Z TFLOP/s
    awk '$1 == "peaks:" { print "peak 0 copy", $3; print "peak 0 product", $6; print "peak 0 sheet", $10 }' \
        "$work/peaks" >>"$out/results"
    for B in $batches; do for program in $programs; do run "$program" "$B" "$round"; done; done
    round=$((round + 1))
done

tables | tee "$out/table.md"
! grep -q '^ours[a-z-]* [0-9]* failed' "$out/results"
