#!/bin/bash
# Checkpoints of sharded state: every program on any number of ranks continues every other program's checkpoints. Whatever goes
# wrong while ranks write or read their shards, the last good checkpoint stays, and all ranks end.
. test/lib.sh
# 48 sequences a step: they divide over 1, 2, 3, 4 and 8 ranks, and 10 steps are more than one epoch.
small=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d2 --heads 2 --channels 16 --seq-len 16 --total-batch-size 768
    --lr 3e-3 --warmup-steps 5 --eval-every 0 --sample-every 0 --steps 10 --save-every 5 --deterministic)

# trains PROGRAM RANKS OUT OPTION...: PROGRAM is single, ddp, or zero1, zero2, zero3; PRECISION is fp32 if it is not set
trains() {
    local name=$1 ranks=$2 out=$3 stage=() binary
    shift 3
    case $name in zero?) stage=(--zero-stage "${name#zero}") name=zero ;; esac
    binary=$(program "${PRECISION:-fp32}" | sed "s/train_gpt2_single/train_gpt2_$name/")
    on_ranks "$ranks" "$binary" "${small[@]}" --batch-size $((48 / ranks)) --out "$out" "${stage[@]}" "$@" > "$out.log" 2>&1 ||
        { tail -n 20 "$out.log"; return 1; }
}
close() { # OUT OUT
    "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$1/step_00000010/model.safetensors" "$2/step_00000010/model.safetensors" --rtol 1e-5 --atol 1e-6
}
goes_on() { # FROM PROGRAM RANKS: PROGRAM continues from step 5 of the run FROM
    half "$work/$1" "$work/second" && trains "$2" "$3" "$work/second" --resume && grep -q "step 5 of 10" "$work/second.log" &&
        close "$work/$1" "$work/second"
}
goes_on_to_the_bit() { goes_on "$@" && same_run "$work/$1" "$work/second" 00000010; }

# ---- the matrix: saved by X, continued by Y; in the quick tier pairs with stage 3 ----
saved_by=(single:1 ddp:3 zero1:8 zero2:2 zero3:4)
others=(3 8 4 2 1)
[ "$BUILD" = build ] || saved_by=(single:1 ddp:2 zero1:3 zero2:2 zero3:3) others=(2 3 2 3 1)
turn=0
for x in "${saved_by[@]}"; do
    name=${x%:*} n=${x#*:}
    for_tier both
    check "$name on $n rank(s): 10 steps without a break, saved halfway" trains $name $n "$work/$name"
    for_tier quick
    check "  has train_gpt2_single's losses, norms and weights" close "$work/single" "$work/$name"
    for y in "${saved_by[@]}"; do
        name2=${y%:*} turn=$((turn + 1)) m=${others[turn % 5]}
        for_tier quick
        if [ $name2 = $name ]; then
            check "  continued by the same program: the same to the bit" goes_on_to_the_bit $name $name $n
            continue
        fi
        [ $name2 = single ] && m=1
        [ $name2 = zero3 ] || [ $name = zero3 ] || for_tier rest
        [ "$BUILD" = build ] || [ $tier = quick ] || continue
        check "  continued by $name2 on $m rank(s)" goes_on $name $name2 $m
    done
done
for x in "zero3 3" "zero3 8" "zero2 3" "zero1 1"; do
    [ "$BUILD" = build ] || continue
    case $x in "zero3 3") for_tier quick ;; *) for_tier rest ;; esac
    check "${x% *} continues its own on ${x#* } rank(s)" goes_on ${x% *} $x
done
# --steps 0 saves what training would begin with, and the run that continues it is one without a break.
begins() { # NAME RANKS BY RANKS
    rm -rf "$work/zero" && trains $1 $2 "$work/zero" --steps 0 && [ -e "$work/zero/step_00000000/state.json" ] &&
        trains $3 $4 "$work/zero" --resume && grep -q "step 0 of 10" "$work/zero.log" && close "$work/$1" "$work/zero"
}
begins_to_the_bit() { begins $1 $2 $1 $2 && same_run "$work/$1" "$work/zero" 00000010; }
for x in "${saved_by[@]}"; do
    case $x in single*|zero3*) for_tier quick ;; *) for_tier rest ;; esac
    check "${x%:*} saves step 0, and continues from it to the bit" begins_to_the_bit ${x%:*} ${x#*:}
done
for_tier quick
check "zero3's step 0 on ${others[3]} ranks is continued by single" begins zero3 ${others[3]} single 1
check "  and single's by zero3 on 3" begins single 1 zero3 3

# In rank order all stages are the same to the bit on the same number of ranks, so they may even take turns.
for x in "zero2 zero3 2" "zero3 zero1 4" "zero3 ddp 4" "ddp zero2 3"; do
    [ "$BUILD" = build ] || continue
    case $x in "zero3 ddp"*) for_tier quick ;; *) for_tier rest ;; esac
    read -r from by ranks <<< "$x"
    check "$by continues $from on $ranks ranks to the bit" goes_on_to_the_bit $from $by $ranks
done
for_tier quick
strict_saves() { # NAME RANKS: right after an update, while parameters are being sent to the other ranks
    SHARD_COMM_STRICT=1 trains "$1" "$2" "$work/strict" && same_run "$work/$1" "$work/strict" 00000005 &&
        same_run "$work/$1" "$work/strict" 00000010
    local status=$?
    rm -rf "$work/strict"
    return $status
}
for x in "${saved_by[@]}"; do
    case $x in zero*) check "${x%:*} saves the same to the bit in strict mode" strict_saves ${x%:*} ${x#*:} ;; esac
done

# ---- 16 bits: master weights are also state ----
if [ "$BUILD" = build ]; then
    export PRECISION=bf16
    check "bf16: zero3 on 3 ranks" trains zero3 3 "$work/bf16"
    for y in zero3 zero1 zero2 ddp; do check "  continued by $y: the same to the bit" goes_on_to_the_bit bf16 $y 3; done
    near() { half "$work/bf16" "$work/second" && trains "$1" "$2" "$work/second" --resume &&
        "$COMPARE" metrics "$work/bf16/metrics.jsonl" "$work/second/metrics.jsonl" --rtol 1e-4 --only loss; }
    check "  continued by zero2 on 4 ranks, with nearly the same losses" near zero2 4
    check "  and by train_gpt2_single" near single 1
    unset PRECISION
fi

# ---- damage is found by ranks that each read a part ----
damaged() { # PATTERN FILE COMMAND...: the run from a checkpoint whose file COMMAND has changed is refused by every rank
    half "$work/zero3" "$work/damaged" && "${@:3}" "$work/damaged/step_00000005/$2" &&
        every_rank 3 ".*$1" "$BUILD/train_gpt2_zero" "${small[@]}" \
            --batch-size 16 --zero-stage 3 --out "$work/damaged" --resume
}
check "a flipped bit in the first moments is found" damaged 'optimizer.safetensors: .*"m" do not match their checksum' optimizer.safetensors flip 30
for_tier rest
check "  in the second moments" damaged 'optimizer.safetensors: .*"v" do not match their checksum' optimizer.safetensors flip 97
check "  and in the weights" damaged 'model.safetensors: .*do not match their checksum' model.safetensors flip 50
check "a file that ends early is found" damaged 'optimizer.safetensors' optimizer.safetensors truncate -s -100

# ---- ranks that cannot write, and ranks that die while they do ----
large=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d5 --heads 2 --channels 128 --seq-len 16 --batch-size 1 --warmup-steps 0
    --lr-schedule constant --eval-every 0 --sample-every 0 --save-every 1 --keep 2 --zero-stage 3 --out "$work/large")
saver=$BUILD/train_gpt2_zero cannot_write_file=optimizer.safetensors
. test/runs/saving_ranks.sh
done_testing
