#!/bin/bash
# build/plan: its tables, its errors, and its predictions compared with what training programs predict and measure.
# (test_plan.c tests the formulas.)
. test/lib.sh
plan=$BUILD/plan

says() { # PATTERN... -- OPTION...
    local patterns=() pattern
    while [ "$1" != -- ]; do patterns+=("$1"); shift; done
    shift
    "$plan" "$@" > "$work/said" || return 1
    sed '/^times/,$d' "$work/said"
    for pattern in "${patterns[@]}"; do grep -qEe "$pattern" "$work/said" || { echo "there is no '$pattern' in it"; return 1; }; done
}
# row NAME COLUMN: prints a column of the first row with this name in the output, counted after the name
row() { row_of "$1" "$2" < "$work/said"; }
row_of() { sed -n "s/^ *$1  *//p" | head -n 1 | awk -v column="${2:-1}" '{ print $column }'; }

# ---- tables ----
xl=(--model gpt2-xl --ranks 8 --seq-len 1024 --batch-size 4)
check "gpt2-xl on 8 ranks: bytes by kind, with and without recomputation" says "1557611200 parameters" "bytes per rank of 8 .*ddp .*zero-1 .*zero-2 .*zero-3 .*fsdp" \
    "parameters +3.1 GB +3.1 GB +3.1 GB +389 MB" "gradients +3.1 GB +3.1 GB +389 MB" "optimizer state +18.7 GB +2.3 GB" "activations +10.6 GB" "or recomputed +1.4 GB" -- "${xl[@]}"
check "  24 GB are too few for DDP and enough for FSDP" says "fits +24 GB +40 GB +80 GB +141 GB" "ddp +no +yes" "fsdp +yes +yes" -- "${xl[@]}"
check "  so they are on 4 ranks, and recomputing does not help DDP" says "ddp +no" "fsdp +yes" -- --model gpt2-xl --ranks 4 --seq-len 1024 --batch-size 1 --recompute block
check "  at a larger batch only with recomputation" says "zero-3 +recomputed +yes" -- "${xl[@]}" --batch-size 8
check "  and more ranks make room for a larger model" eval 'says "fsdp +d55, 8.36 B" -- "${xl[@]}" && says "fsdp +d[7-9][0-9], " -- "${xl[@]}" --ranks 64'
# The classifier of a GPU takes 5,312 rows of GPT-2's logits at a time; where it needs several chunks, their fp32 sums take 4 Vp C bytes.
check "more rows than the classifier takes at once need memory to add them up" says "workspace +154533888 " -- \
    --model gpt2 --ranks 8 --seq-len 1024 --batch-size 6 --exact
check "  but not in fp32, nor where there is one chunk" eval '
    says x? -- --model gpt2 --ranks 8 --batch-size 6 --precision fp32 && ! grep "^  workspace" "$work/said" &&
    says x? -- --model gpt2 --ranks 8 --batch-size 5 && ! grep "^  workspace" "$work/said"'
check "times are printed up to 4096 ranks, for every stage" eval 'says "^times" -- "${xl[@]}" && [ "$(grep -cE "^ +4096 .*%$" "$work/said")" = 5 ]'
check "  no slower over NVLink than over PCIe" eval '
    says x? -- "${xl[@]}" > /dev/null && fast=$(row 8 5) && says x? -- "${xl[@]}" --link pcie > /dev/null && slow=$(row 8 5) &&
    awk -v fast="$fast" -v slow="$slow" "BEGIN { exit !(fast > slow && slow > 0) }"'
# columns NAME...: the columns of the second table of bytes, which is about tensor parallelism
columns() { sed '1,/^tp t:/d' "$work/said" | sed -n '1s/^bytes per rank of [0-9]* *//p' | tr -s ' ' | grep -x "$*"; }
check "as many ranks share a copy of the model as divide ranks and heads" eval '
    says "^tp t: t ranks share .* 16 x 1024 tokens" "^  tp 8 +yes" -- --model gpt2-medium --ranks 8 --seq-len 1024 && columns tp 1 tp 2 tp 4 tp 8 &&
    says "^  tp 2 +yes" -- --model gpt2-medium --ranks 6 --seq-len 1024 && columns tp 1 tp 2'
check "  with times for each" eval '
    says "^tp of 8 +t " -- --model gpt2-medium --ranks 8 --seq-len 1024 && [ "$(sed "1,/^tp of 8/d" "$work/said" | awk "{ print \$1 }" | xargs)" = "1 2 4 8" ]'
check "  alone is alone: nothing about sharing" eval 'says x? -- --model gpt2 --ranks 1 && ! grep "^tp" "$work/said"'
check "  or a line that says why not" says "tensor parallelism: none of 2, 4 and 8 divides 8 ranks, 25 heads and 50304 tokens" -- "${xl[@]}"
check "asked for a number of ranks, plan shows that one, on 1 to 4096 / t copies" eval '
    says "^  tp 3 +yes" "^tp 3 +ranks" -- --model gpt2 --ranks 6 --tensor-parallel 3 && columns tp 3 &&
    [ "$(sed "1,/^tp 3 *ranks/d" "$work/said" | awk "{ print \$1 }" | xargs)" = "3 6 12 24 48 96 192 384 768 1536 3072" ]'
check "rows that are cut leave less to keep, and cost time" eval '
    says x? -- --model gpt2 --ranks 4 --tensor-parallel 4 --exact && kept=$(sed "1,/^tp t:/d" "$work/said" | row_of activations) &&
    whole=$(sed "1,/^tp 4/d" "$work/said" | awk "NR == 1 { print \$5 }") &&
    says "they cut its rows$" -- --model gpt2 --ranks 4 --tensor-parallel 4 --sequence-parallel --exact &&
    cut=$(sed "1,/^tp t:/d" "$work/said" | row_of activations) && time=$(sed "1,/^tp 4/d" "$work/said" | awk "NR == 1 { print \$5 }") &&
    echo "$kept $cut bytes, $whole $time ms" && awk -v k="$kept" -v c="$cut" -v w="$whole" -v t="$time" "BEGIN { exit !(c < 0.7 * k && t > w) }"'
check "a number of parameters gives the ZeRO paper's table" says "bytes per rank of 64" "^  4 +120.0 +52.50 +41.25 +30.00" "^  64 +120.0 +31.41 +16.64 +1.88" \
    "^  1024 +120.0 +30.09 +15.10 +0.12" "total +120 GB +31.4 GB +16.6 GB +1.9 GB" "zero-2 +yes +10.8 B" "ddp +no +1.5 B" -- --params 7.5e9 --ranks 64
check "  also without a master copy" says "7e\+09 parameters in bf16: 2 \+ 2 \+ 8 bytes" "total +84.0 GB" -- --params 7e9 --master off --ranks 1
check "  and in fp32" says "4 \+ 4 \+ 8 bytes" -- --params 1e9 --precision fp32

# ---- errors ----
check "an unknown model is an error" fails_with "gpt5 is not known" -- "$plan" --model gpt5
check "options of a model beside --params are an error" fails_with "layers cannot be used with --params" -- "$plan" --params 1e9 --layers 3
check "  so is --master without --params" fails_with "master is for --params" -- "$plan" --master off
check "  and --master with fp32" fails_with "master cannot be used with --precision fp32" -- "$plan" --params 1e9 --master off --precision fp32
check "half a parameter is an error" fails_with "params must be at least 1, not 0.5" -- "$plan" --params 0.5
check "a measured and a computed time together are an error" \
    fails_with "give either that or these" -- "$plan" --compute-ms 5 --mfu 0.5
check "more tokens than positions are an error" fails_with "longer than the 1024 positions" -- "$plan" --model gpt2 --seq-len 2048
check "heads that do not divide the channels are an error" fails_with "do not divide over 3 heads" -- "$plan" --heads 3
check "a link that is neither known nor a file is an error" fails_with "ethernet.*nvlink, nvlink3, nvlink2, pcie, infiniband, hdr or a file" -- "$plan" --link ethernet
check "  also between nodes" fails_with "ethernet" -- "$plan" --inter-link ethernet
check "ranks that t does not divide are an error, in the stage's words" \
    fails_with "tensor-parallel 3 does not divide 8 ranks; start a multiple of 3" -- "$plan" --model gpt2 --tensor-parallel 3
check "  so are heads" fails_with "tensor-parallel 2 does not divide 25 heads, and a head is not cut" -- "$plan" --model gpt2-xl --tensor-parallel 2
check "  the vocabulary" fails_with "tensor-parallel 9 does not divide the vocabulary" -- "$plan" --heads 9 --channels 576 --ranks 9 --vocab-size 257 --tensor-parallel 9
check "  rows, if they are cut" fails_with "sequence-parallel cuts the tokens" -- \
    "$plan" --model gpt2 --ranks 3 --seq-len 4 --batch-size 1 --tensor-parallel 3 --sequence-parallel
check "  and --keep-gathered without cut rows" fails_with "keep-gathered is about what --sequence-parallel gathers" -- "$plan" --model gpt2 --keep-gathered
check "tensor parallelism beside --params is an error" fails_with "tensor-parallel cannot be used with --params" -- "$plan" --params 1e9 --tensor-parallel 2
check "0 ranks are an error" fails_with "ranks must be between 1 and" -- "$plan" --ranks 0

# ---- bytes: the training programs' own ----
model=(--model d3 --heads 4 --channels 48 --seq-len 24 --batch-size 3) # units that 2 ranks cannot share without padding
record() { head -n 1 "$work/run/metrics.jsonl" | sed -n "s/.*\"$1\":\([0-9][0-9.e+]*\).*/\1/p"; } # a number in the run's record
predicted() { head -n 1 "$work/run/metrics.jsonl" | sed -n "s/.*\"predicted_bytes\":{[^}]*\"$1\":\([0-9]*\).*/\1/p"; }
same_bytes() { # COLUMN RANKS PROGRAM ACCUMULATION OPTION...
    local column=$1 ranks=$2 program=$3 accumulation=$4 kind row recompute=none precision=fp32 wrap=1 copies shared=()
    shift 4
    copies=$ranks
    case " $* " in *" --tensor-parallel "*)
        shared=("$@")
        copies=$((ranks / $(sed 's/.*--tensor-parallel \([0-9]*\).*/\1/' <<< "$*"))) ;;
    esac
    case " $* " in *" --recompute block "*) recompute=block ;; esac
    case $program in */bf16*) precision=bf16 ;; esac
    case " $* " in *" --wrap-blocks "*) wrap=$(sed 's/.*--wrap-blocks \([0-9]*\).*/\1/' <<< "$*") ;; esac
    rm -rf "$work/run"
    on_ranks "$ranks" "$program" "${model[@]}" "$@" --total-batch-size $((24 * 3 * copies * accumulation)) --data $REFERENCE/tokens.bin --val-data= \
        --eval-every 0 --sample-every 0 --steps 1 --out "$work/run" > "$work/log" 2>&1 || { tail -n 20 "$work/log"; return 1; }
    says x? -- "${model[@]}" --vocab-size "$(record vocabulary)" --precision $precision --device cpu --ranks "$ranks" --accumulation "$accumulation" \
        --wrap-blocks "$wrap" --exact "${shared[@]}"
    [ "${#shared[@]}" = 0 ] || sed -i '1,/^tp t:/d' "$work/said"
    for kind in parameters gradients "optimizer state" communication activations; do
        row=$kind
        [ "$kind" = activations ] && [ $recompute = block ] && row="or recomputed"
        [ -n "$(predicted "$kind")" ] && [ "$(predicted "$kind")" = "$(row "$row" "$column")" ] ||
            { echo "$kind: $(row "$row" "$column"), not $(predicted "$kind")"; return 1; }
    done
    awk -v run="$(record predicted_comm_bytes)" -v plan="$(row "sent per step" "$column")" 'BEGIN { exit !(run >= plan && run < plan + 1) }' ||
        { echo "sent: not $(record predicted_comm_bytes)"; return 1; }
}
check "bytes are train_gpt2_ddp's on 2 ranks" same_bytes 1 2 $BUILD/train_gpt2_ddp 1
check "  on 1" same_bytes 1 1 $BUILD/train_gpt2_ddp 1
check "  on 3, with accumulation and recomputation" same_bytes 1 3 $BUILD/train_gpt2_ddp 2 --recompute block
for stage in 1 2 3; do
    check "bytes are train_gpt2_zero's at stage $stage on 2 ranks" same_bytes $((stage + 1)) 2 $BUILD/train_gpt2_zero 1 --zero-stage $stage
    check "  on 3, with accumulation and recomputation" same_bytes $((stage + 1)) 3 $BUILD/train_gpt2_zero 2 --zero-stage $stage --recompute block
done
check "bytes are train_gpt2_fsdp's on 2 ranks" same_bytes 5 2 $BUILD/train_gpt2_fsdp 1
check "  on 1" same_bytes 5 1 $BUILD/train_gpt2_fsdp 1
check "  on 3, with accumulation and recomputation" same_bytes 5 3 $BUILD/train_gpt2_fsdp 2 --recompute block
check "  by groups of 2 of its 3 blocks" same_bytes 5 2 $BUILD/train_gpt2_fsdp 2 --wrap-blocks 2
check "  and as one group" same_bytes 5 2 $BUILD/train_gpt2_fsdp 2 --wrap-blocks 0
check "  and in bf16" same_bytes 5 2 "$(of train_gpt2_fsdp bf16)" 1
check "bytes are train_gpt2_tp's on 2 ranks that share a copy" same_bytes 1 2 $BUILD/train_gpt2_tp 1 --tensor-parallel 2
check "  on 1" same_bytes 1 1 $BUILD/train_gpt2_tp 1 --tensor-parallel 1
check "  on 4, with accumulation and recomputation" same_bytes 1 4 $BUILD/train_gpt2_tp 2 --tensor-parallel 4 --recompute block
check "  with two copies" same_bytes 1 4 $BUILD/train_gpt2_tp 1 --tensor-parallel 2
check "  where rows are cut" same_bytes 1 4 $BUILD/train_gpt2_tp 2 --tensor-parallel 2 --sequence-parallel
check "  and recomputed" same_bytes 1 2 $BUILD/train_gpt2_tp 1 --tensor-parallel 2 --sequence-parallel --recompute block
check "  or kept when gathered" same_bytes 1 2 $BUILD/train_gpt2_tp 1 --tensor-parallel 2 --sequence-parallel --keep-gathered
check "  and in bf16" same_bytes 1 4 "$(of train_gpt2_tp bf16)" 1 --tensor-parallel 2 --sequence-parallel
check "bytes are train_gpt2_ddp's in bf16" same_bytes 1 2 "$(of train_gpt2_ddp bf16)" 1
check "  and train_gpt2_zero's at stage 3" same_bytes 4 2 "$(of train_gpt2_zero bf16)" 1 --zero-stage 3

# ---- seconds ----
# The prediction for two ranks uses the link, measured here with messages as large as the model's units, and compute measured on
# one rank. A real step takes longer for reasons that are not in the model: the communicating thread takes a core, ranks share
# memory, other programs run. These only add time, so the minimum of a few steps counts, over up to five tries, and a factor of 3
# either way is allowed. That still tells milliseconds from microseconds. (test_plan.c tests what a link does to a step.)
least() { cut -d: -f2 | sort -g | head -n 1; }
small_step=(--model d4 --seq-len 16 --batch-size 1) # many bytes to send per FLOP, so that the link matters
steps() { # NAME RANKS OPTION...
    local name=$1 ranks=$2
    shift 2
    rm -rf "$work/$name"
    on_ranks "$ranks" $BUILD/train_gpt2_ddp "${small_step[@]}" --data $REFERENCE/tokens.bin --val-data= --eval-every 0 --sample-every 0 --steps 15 \
        --out "$work/$name" "$@"
}
measured() { grep -o "\"$2\":[0-9.e-]*" "$work/$1/metrics.jsonl" | least; } # RUN KEY
times() { # appends the predicted and measured times of the step and of communication, each to its own file
    on_ranks 2 $BUILD/comm_bench --op all -b 64K -e 4M -f 4 -n 5 --json "$work/link.json" && steps one 1 && steps two 2 && steps naive 2 --ddp naive &&
        says x? -- "${small_step[@]}" --vocab-size 257 --precision fp32 --device cpu --link "$work/link.json" --ranks-per-node 0 \
            --compute-ms "$(measured one step_ms)" > /dev/null || return 1
    row 2 4 >> "$work/step.predicted"
    measured two step_ms >> "$work/step.measured"
    row 2 2 >> "$work/communication.predicted"
    measured naive comm_exposed_ms >> "$work/communication.measured" # naive DDP hides none of it
}
within() { # WHAT
    local x y
    x=$(sort -g "$work/$1.predicted" | head -n 1) y=$(sort -g "$work/$1.measured" | head -n 1)
    echo "$1: $x ms predicted, $y ms measured"
    awk -v x="$x" -v y="$y" 'BEGIN { exit !(x > 0 && x < 3 * y && y < 3 * x) }'
}
times_hold() {
    local try
    for try in 1 2 3 4 5; do
        if times > "$work/times.log" 2>&1; then within step && within communication && return
        else tail -n 20 "$work/times.log" # on a busy machine a sweep may fit no line
        fi
    done
    return 1
}
if [ "$BUILD" = build ]; then # sanitizers would distort the times
    check "a step of two ranks, and the naive one's communication, take about as long as predicted" times_hold
fi
done_testing
