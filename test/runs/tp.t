#!/bin/bash
# Tensor parallelism: ranks that share a copy of the model, and copies of it that are data parallel. Against PyTorch's run of the whole
# model within rounding; against DDP that forms sums in the same parts (test/split/tensor.h) to the bit, in every metric, weight and
# moment. Each rank holds and sends what the formulas say, which are written here a second time, in plain numbers.
. test/lib.sh
case $BUILD in */debug) debug=1 ;; *) debug= ;; esac

# ---- PyTorch: 16 sequences of 32 tokens a step, 4 heads; of 384 tokens with the padding the fourth part has none but padding ----
matches() { # RANKS T OPTION...
    local ranks=$1 t=$2
    rm -rf "$work/run"
    on_ranks "$ranks" "$BUILD/train_gpt2_tp" "${reference_options[@]}" --tensor-parallel "$t" --batch-size $((16 * t / ranks)) --out "$work/run" \
        "${@:3}" > "$work/run.log" 2>&1 || { tail -n 20 "$work/run.log"; return 1; }
    "$COMPARE" metrics $REFERENCE/pytorch_fp32.jsonl "$work/run/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" metrics $REFERENCE/pytorch_fp32.jsonl "$work/run/metrics.jsonl" --atol 1e-6 --only param_norm &&
        "$COMPARE" weights $REFERENCE/pytorch_fp32.safetensors "$work/run/step_00000020/model.safetensors" --rtol 1e-5 --atol 1e-6
}
[ "$BUILD" = build/debug ] && sizes="2:2 4:2" || sizes="1:1 2:2 4:4 4:2" # with more the sanitizers would see nothing more
for size in $sizes; do
    n=${size%:*} t=${size#*:}
    check "$n rank(s), $t of them a copy: PyTorch's losses, norms and weights" matches $n $t
    check "  in strict mode" strict matches $n $t
    check "  with --sequence-parallel, in strict mode" strict matches $n $t --sequence-parallel
    check "  that keeps what is gathered, with recomputation, in strict mode" strict matches $n $t --sequence-parallel --keep-gathered --recompute block
    check "  with recomputation and --no-overlap" matches $n $t --sequence-parallel --recompute block --no-overlap
    [ $t = $n ] || check "  in 4 micro-batches" matches $n $t --batch-size 2 --sequence-parallel
done

# ---- to the bit ----
options=(--data $REFERENCE/tokens.bin --val-data= --model d2 --heads 4 --channels 16 --seq-len 16 --total-batch-size 512 --steps 10
    --lr 3e-3 --warmup-steps 5 --eval-every 0 --sample-every 0 --deterministic)
# build NAME PRECISION FLAG...: DDP with test/split/tensor.h, whose parts come from the environment
build() {
    local folder=$BUILD/split/$1/$2
    mkdir -p "$folder"
    flock "$folder" env -u MAKEFLAGS -u MAKELEVEL make --no-print-directory DEVICE=cpu PRECISION="$2" DEBUG="$debug" BUILD="$folder" \
        CFLAGS="-include test/split/tensor.h '-DPARTS=atoi(getenv(\"PARTS\"))' ${*:3}" "$folder/train_gpt2_ddp"
}
run() { # OUT COMMAND...
    local out=$work/$1
    shift
    rm -rf "$out"
    "$@" --out "$out" > "$out.log" 2>&1 || { tail -n 20 "$out.log"; return 1; }
}
# reference OUT NAME PRECISION COPIES T OPTION...; tp OUT PRECISION COPIES T OPTION...
reference() { PARTS=$5 run "$1" on_ranks "$4" "$BUILD/split/$2/$3/train_gpt2_ddp" "${options[@]}" --batch-size $((32 / $4)) "${@:6}"; }
tp() {
    run "$1" on_ranks $(($3 * $4)) "$(of train_gpt2_tp "$2")" "${options[@]}" --tensor-parallel "$4" --batch-size $((32 / $3)) "${@:5}"
}
ddp() { run "$1" on_ranks "$3" "$(of train_gpt2_ddp "$2")" "${options[@]}" --batch-size $((32 / $3)) "${@:4}"; }
same() { same_run "$work/$1" "$work/$2" 00000010; }
differ() { # OUT OUT: both have finished, and their weights are not the same
    local weights=step_00000010/model.safetensors
    [ -s "$work/$1/$weights" ] && [ -s "$work/$2/$weights" ] || { echo "a run has saved nothing"; return 1; }
    ! cmp "$work/$1/$weights" "$work/$2/$weights"
}
[ "$BUILD" = build ] && precisions="fp32 bf16" || precisions=fp32
other=(--val-data $REFERENCE/tokens.bin --eval-every 5 --eval-steps 2 --sample-every 5 --sample-tokens 9 --vocab-size 300)
samples() { grep -A 3 '^sample' "$work/$1.log" | grep -v -e '^step' -e '^saved' -e '^memory'; }
same_samples() { [ "$(samples "$1" | wc -c)" -gt 40 ] && [ "$(samples "$1")" = "$(samples "$2")" ]; }
for precision in $precisions; do
    check "$precision: DDP with test/split/tensor.h" build tensor $precision
    check "  and with layernorms in parts" build sequence $precision -DTENSOR_SEQUENCE
    check "$precision: copies of one rank have the bits of DDP" eval "ddp one $precision 2 && tp many $precision 2 1 && same one many"
    check "  also with --sequence-parallel" eval "tp many $precision 2 1 --sequence-parallel && same one many"
    for t in 2 4; do
        check "$precision: $t ranks that share the model have the bits of $t parts" eval \
            "reference one tensor $precision 1 $t && tp many $precision 1 $t && same one many"
        check "  not those of DDP" eval "ddp plain $precision 1 && differ plain many"
        check "  with recomputation, --no-overlap, in strict mode" eval "strict tp many $precision 1 $t --recompute block --no-overlap && same one many"
        check "  with --sequence-parallel those of $t parts of layernorms" eval \
            "reference rows sequence $precision 1 $t && tp many $precision 1 $t --sequence-parallel && same rows many"
        check "    not the bits of whole layernorms" differ one many
        check "    with --keep-gathered" eval "tp many $precision 1 $t --sequence-parallel --keep-gathered && same rows many"
        check "    with recomputation, in strict mode" eval "strict tp many $precision 1 $t --sequence-parallel --recompute block && same rows many"
    done
    check "$precision: 2 x 2 ranks have the bits of DDP on 2 ranks, each in 2 parts" eval \
        "reference one tensor $precision 2 2 && tp many $precision 2 2 --check-every 3 && same one many"
    check "  also with accumulation and one all-reduce after another" eval \
        "reference one tensor $precision 2 2 --batch-size 8 && tp many $precision 2 2 --batch-size 8 --ddp naive && same one many"
done
check "3 ranks that share the model, of 6 heads" eval "reference one tensor fp32 1 3 --heads 6 --channels 24 &&
    tp many fp32 1 3 --heads 6 --channels 24 && same one many"
check "evaluations and samples are the same" eval "reference one tensor fp32 2 2 ${other[*]} && tp many fp32 2 2 ${other[*]} && same one many &&
    same_samples one many"
# In a part of 3 the last row of a sample is no multiple of it.
check "  also with --sequence-parallel" eval "reference one sequence fp32 1 3 ${other[*]} --heads 6 --channels 24 --seq-len 48 --total-batch-size 1536 &&
    tp many fp32 1 3 ${other[*]} --heads 6 --channels 24 --seq-len 48 --total-batch-size 1536 --sequence-parallel && same one many && same_samples one many"
check "a trace is written" eval "tp many fp32 2 2 --trace $work/trace.json && grep -q 'of tp.1' $work/trace.json && grep -q 'of dp.0' $work/trace.json"

# ---- what a rank holds and sends: 2 layers, 4 heads, 16 channels, a vocabulary of 384 with its padding, 16 positions ----
holds_and_sends() { # COPIES T SEQUENCE KEEP RECOMPUTE: t ranks with B*T = 512 / COPIES tokens
    local D=$1 t=$2 s=$3 keep=$4 again=$5 C=16 L=2 BT=$((512 / $1)) rows kept P activations sums sent flags=()
    [ $s = 1 ] && flags+=(--sequence-parallel)
    [ $s$keep = 11 ] && flags+=(--keep-gathered)
    [ $again = 1 ] && flags+=(--recompute block)
    rows=$((s ? BT / t : BT)) kept=$((again ? 1 : L))
    P=$((L * ((12 * C * C + 7 * C) / t + 6 * C) + (384 / t + 16 + 2) * C))
    activations=$((L * rows * C * 4 + kept * (rows * (C * 4 + 16) + (s && !keep ? rows : BT) * 2 * C * 4 + BT * (12 * C / t * 4 + 4 / t * 4))))
    activations=$((activations + rows * (2 * C * 4 + 8) + BT * (3 * C * 4 + 4 * C / t * 4 + 12) + BT * (384 / t * 4 + 3 * t * 4)))
    sums=$((2 * (4 * L + 2) + again * (2 + s) * L + (s && !keep ? 2 * L : 0))) # halves of sums
    sent=$((D * (t - 1) * (sums * BT * C * 4 + t * BT * 12 + 2 * (s * (2 * L + 1) * 2 * C * 4 + 16))))
    sent=$(((sent + t * 2 * (D - 1) * (4 * P + 8)) / (D * t)))
    tp many fp32 $D $t "${flags[@]}" --steps 2 || return 1
    echo "expected: parameters $((4 * P)), activations $activations, sent $sent; found:"
    head -n 1 "$work/many/metrics.jsonl" | grep -o '"predicted_bytes":{[^}]*}'
    field "$work/many" comm_bytes
    [ "$(field "$work/many" parameters)" = $((4 * P)) ] && [ "$(field "$work/many" gradients)" = $((4 * P)) ] &&
        [ "$(field "$work/many" "optimizer state")" = $((8 * P)) ] && [ "$(field "$work/many" comm_bytes | sort -u)" = $sent ] &&
        [ "$(($(field "$work/many" activations) - activations))" = 40 ] && # StepStats
        ! grep 'than predicted$' "$work/many.log"
}
for size in "1 2 0 0 0" "1 2 1 0 0" "1 4 1 1 0" "1 4 0 0 1" "2 2 1 0 1" "2 2 1 1 1" "2 2 0 0 0" "2 1 0 0 0"; do
    check "bytes held and sent (copies, ranks of each, sequence, keep, recompute: $size)" holds_and_sends $size
done

# ---- what cannot be ----
every_rank() { # RANKS PATTERN OPTION...: each rank says so
    local patterns=() q
    for ((q = 0; q < $1; q++)); do patterns+=("^rank $q: error: $2"); done
    fails_with "${patterns[@]}" -- on_ranks "$1" "$BUILD/train_gpt2_tp" "${options[@]}" --batch-size 4 --out "$work/refused" "${@:3}"
}
check "heads that do not divide" every_rank 4 "--tensor-parallel 4 does not divide 2 heads, .*choose --heads as a multiple of 4" --heads 2
check "ranks that do not divide" every_rank 4 "--tensor-parallel 3 does not divide 4 ranks" --tensor-parallel 3
check "a vocabulary that does not divide" every_rank 3 "--tensor-parallel 3 does not divide the vocabulary, 512 .*choose --vocab-size 768" \
    --vocab-size 500 --heads 3 --channels 24
check "rows that do not divide" every_rank 4 "--sequence-parallel .* --batch-size 1 x --seq-len 15 = 15 does not divide; choose a multiple of 4" \
    --sequence-parallel --batch-size 1 --seq-len 15 --total-batch-size 0
check "--keep-gathered alone" every_rank 2 "--keep-gathered is about what --sequence-parallel gathers" --keep-gathered
check "a batch that does not divide over copies" every_rank 4 "--total-batch-size 100 must be .* x 2 copies of the model = 128" \
    --tensor-parallel 2 --total-batch-size 100

# ---- ranks that die, hang or differ ----
faulty() { # RANK:STEP:FAULT
    on_ranks 4 "$BUILD/train_gpt2_tp" "${options[@]}" --tensor-parallel 2 --batch-size 16 --comm-timeout 5 --check-every 1 --fault "$1"
}
fault() { fails_with "${@:2}" -- faulty "$1"; } # RANK:STEP:FAULT PATTERN...
dies() { # RANK:STEP PATTERN: a killed rank, which the others name
    ! faulty "$1:kill" 2> "$work/stderr" || return 1
    cat "$work/stderr"
    for q in 0 1 2; do grep -q "^rank $q: error: $2" "$work/stderr" || return 1; done
}
check "a bit that flips in a copied tensor is found" fault 1:3:bitflip "after step 3 the parameters of unit 0 differ between rank 0 and rank 1"
check "a rank that hangs is named" fault 2:3:hang "error: .*rank 2"
check "a rank that dies is named by the others" dies 3:3 "rank 3 has died"
done_testing
