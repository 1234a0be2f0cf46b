#!/bin/bash
# ZeRO: every stage's losses, norms, weights and optimizer state are DDP's to the bit in rank order, and agree with PyTorch's.
# Each rank holds and sends as many bytes as the formulas say. The formulas are written here a second time, in plain numbers.
. test/lib.sh
ddp=$BUILD/train_gpt2_ddp zero=$BUILD/train_gpt2_zero

# runs RANKS BATCH TOTAL OUT PROGRAM OPTION...: the training run of test/reference/ddp_reference.py.
runs() {
    local ranks=$1 batch=$2 total=$3 out=$4 program=$5
    shift 5
    rm -rf "$out"
    on_ranks "$ranks" "$program" "${reference_options[@]}" --batch-size "$batch" --total-batch-size "$total" --out "$out" "$@" > "$out.log" 2>&1 ||
        { tail -n 20 "$out.log"; return 1; }
}
close() { # METRICS WEIGHTS OUT
    "$COMPARE" metrics "$1" "$3/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$2" "$3/step_00000020/model.safetensors" --rtol 1e-5 --atol 1e-6
}
is_pytorchs() { close "$REFERENCE/ddp/$1.jsonl" "$REFERENCE/ddp/$1.safetensors" "$2"; } # NAME OUT
is_ddps() { close "$1/metrics.jsonl" "$1/step_00000020/model.safetensors" "$2"; } # OUT OUT

# ---- what a rank holds and sends ----
# The model of the reference run: 32 channels, 2 blocks, a vocabulary of 384 with its padding, 32 positions. fp32.
root=$(((384 + 32 + 2) * 32)) block=$((12 * 32 * 32 + 13 * 32))
kept() { echo $(($(shard $root $1) + 2 * $(shard $block $1))); } # RANKS: prints the elements of a rank's shards of all units
by_formula() { # RANKS STAGE OUT DDP: OUT's bytes by kind; activations and communication without buckets are the same as DDP's
    local N=$1 stage=$2 out=$3 ddp=$4 S units=0 parameters gradients total rows
    S=$(kept $N)
    parameters=$((4 * S * (stage < 3 ? N : 1))) gradients=$((4 * S * (stage < 2 ? N : 1)))
    [ $stage -ge 2 ] && units=$((N * ($(shard $root $N) + 2 * $(shard $block $N)))) # buckets: of the root and two blocks
    [ $stage = 3 ] && units=$((units + N * ($(shard $root $N) + $(shard $block $N)))) # gathered: the root and a block
    total=$((parameters + gradients + 8 * S + $(field $ddp activations) + $(field $ddp workspace) + $(field $ddp communication) + 4 * units))
    rows=$(grep -c 'as predicted$' "$ddp.log") # one for each kind of memory
    [ $N = 1 ] && [ $units != 0 ] && rows=$((rows + 1)) # DDP has no communication memory on one rank, and no row for it
    echo "expected: parameters $parameters, gradients $gradients, optimizer state $((8 * S)), buckets $((4 * units)), in all $total"
    head -n 1 "$out/metrics.jsonl" | grep -o '"predicted_bytes":{[^}]*}'
    [ "$(field $out parameters)" = $parameters ] &&
        [ "$(field $out gradients)" = $gradients ] && [ "$(field $out "optimizer state")" = $((8 * S)) ] &&
        [ "$(field $out communication)" = $(($(field $ddp communication) + 4 * units)) ] &&
        [ "$(field $out mem_bytes | sort -u)" = $total ] && [ "$(field $out mem_peak_bytes | sort -u)" = $total ] && # as measured
        [ "$(grep -c 'as predicted$' "$out.log")" = $rows ] && ! grep 'than predicted$' "$out.log"
}
sends() { # RANKS OUT TIMES: TIMES times each rank sends its shards of all units to every other; and three sums of a double
    local bytes=$((($1 - 1) * (4 * $3 * $1 * $(kept $1) + 3 * 2 * 8) / $1))
    echo "expected: $bytes bytes; measured: $(field "$2" comm_bytes | sort | uniq -c)"
    [ "$(field "$2" comm_bytes | sort -u)" = $bytes ] && [ "$(field "$2" comm_bytes | wc -l)" = 20 ] &&
        grep '^  bytes .*  as predicted$' "$2.log" # on every rank
}

[ "$BUILD" = build ] && all="1 2 3 4 8" || all=3 # with other numbers of ranks the sanitizers would see nothing more
for ranks in $all; do
    case $ranks in 4) for_tier quick ;; *) for_tier rest ;; esac
    total=$((ranks == 3 ? 384 : 512)) batch=$((ranks == 3 ? 4 : 16 / ranks)) # 16 sequences do not divide over 3 ranks
    pytorchs=ranks_$ranks a=$work/ddp b=$work/ddp-2 out=$work/zero out2=$work/zero-2
    [ $ranks = 8 ] && pytorchs=ranks_1 # the same batches
    sizes="$ranks $batch $total" sizes2="$ranks $((batch / 2)) $total"
    check "$ranks rank(s): DDP in rank order" runs $sizes "$a" "$ddp" --deterministic
    check "  has PyTorch's losses, norms and weights" is_pytorchs $pytorchs "$a"
    check "$ranks rank(s): DDP with accumulation, in rank order" runs $sizes2 "$b" "$ddp" --deterministic
    for stage in 1 2 3; do
        options="--zero-stage $stage --deterministic"
        times=$((stage < 3 ? 2 : 3)) times2=$((stage == 1 ? 2 : stage == 2 ? 3 : 6)) # 2, A+1, 3A
        check "$ranks rank(s), stage $stage in rank order: 20 steps" runs $sizes "$out" "$zero" $options
        check "  has DDP's metrics, weights and optimizer state to the bit" same_run "$a" "$out"
        check "  each rank holds what the formula says, of each kind" by_formula $ranks $stage "$out" "$a"
        check "  and sends ${times}P(N-1)/N elements a step" sends $ranks "$out" $times
        check "$ranks rank(s), stage $stage with 2 micro-batches a step" runs $sizes2 "$out2" "$zero" $options
        if [ $stage = 1 ]; then check "  has DDP's metrics, weights and optimizer state to the bit" same_run "$b" "$out2"
        else check "  has DDP's losses, norms and weights" is_ddps "$b" "$out2"; fi
        check "  holds the same bytes" by_formula $ranks $stage "$out2" "$b"
        check "  and sends ${times2}P(N-1)/N elements a step" sends $ranks "$out2" $times2
        check "  in strict mode" strict runs $sizes2 "$out" "$zero" $options
        check "    to the bit" same_run "$out2" "$out"
        [ "$BUILD" = build ] || continue
        check "$ranks rank(s), stage $stage with accumulation, summed by the library" runs $sizes2 "$out" "$zero" --zero-stage $stage
        check "  has PyTorch's losses, norms and weights" is_pytorchs "${pytorchs}_accumulate_2" "$out"
    done
done

for_tier quick
# ---- other shapes: two blocks have one bucket each, so with five blocks each bucket is reused within a step ----
# eps: with a small one, the key biases' rounding noise would become whole steps (test/reference/README.md)
small=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --heads 2 --channels 16 --seq-len 16 --batch-size 4 --total-batch-size 192
    --lr 3e-3 --warmup-steps 2 --eval-every 0 --sample-every 0 --steps 6)
trains() { # RANKS OUT PROGRAM OPTION...
    local ranks=$1 out=$2 program=$3
    shift 3
    rm -rf "$out"
    on_ranks "$ranks" "$program" "${small[@]}" --out "$out" "$@" > "$out.log" 2>&1 || { tail -n 20 "$out.log"; return 1; }
}
samples_of() { sed -n '/^sample/,/^step\|^saved/p' "$1" | grep -v '^step\|^saved'; } # LOG
as_ddp() { # OPTION...: on 3 ranks the run has DDP's bits, and its samples
    trains 3 "$work/zero" "$zero" --deterministic "$@" && same_run "$work/ddp" "$work/zero" 00000006 &&
        cmp <(samples_of "$work/ddp.log") <(samples_of "$work/zero.log")
}
near_ddp() { # OPTION...: nearly DDP's numbers, because sums over micro-batches round differently
    trains 3 "$work/zero" "$zero" --deterministic "$@" && "$COMPARE" metrics "$work/ddp/metrics.jsonl" "$work/zero/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$work/ddp/step_00000006/model.safetensors" "$work/zero/step_00000006/model.safetensors" --rtol 1e-5 --atol 1e-6
}
drew() { samples_of "$work/ddp.log" | grep -c "^sample after" | grep -qx 2; }
deep="--model d5 --val-data $REFERENCE/tokens.bin --eval-every 2 --eval-steps 3 --sample-every 3 --sample-tokens 20"
check "5 blocks: DDP on 3 ranks, with evaluations and samples" trains 3 "$work/ddp" "$ddp" --deterministic $deep
check "  which draws two samples" drew
for stage in 1 2 3; do
    check "  stage $stage with recomputation: its losses, samples, weights and state to the bit" as_ddp $deep --zero-stage $stage --recompute block
    [ "$BUILD" = build ] || continue # the sanitizers would see nothing new in the rest
    check "  stage $stage: its losses, samples, weights and state to the bit" as_ddp $deep --zero-stage $stage
    check "    in strict mode" strict as_ddp $deep --zero-stage $stage
    check "    with 4 micro-batches, nearly" near_ddp $deep --zero-stage $stage --batch-size 1
done
check "1 block: DDP on 3 ranks" trains 3 "$work/ddp" "$ddp" --deterministic --model d1
for stage in 1 2 3; do check "  stage $stage, whose ranks compare their parameters, to the bit" as_ddp --model d1 --zero-stage $stage --check-every 2; done
for stage in 1 2 3; do
    [ "$BUILD" = build ] || continue
    check "stage $stage: ranks that compare their parameters find them equal" trains 3 "$work/zero" "$zero" --model d5 --check-every 1 --zero-stage $stage
done

# ---- the purpose: a model that does not fit otherwise ----
# 24 blocks of 16 channels, so that one unit's gathered parameters and gradients are few; one short sequence per rank.
many=(--model d24 --batch-size 1 --seq-len 8 --total-batch-size 0 --steps 2)
peak() { # RANKS: prints stage 3's peak bytes
    trains "$1" "$work/peak-$1" "$zero" "${many[@]}" --zero-stage 3 > "$work/peak.log" 2>&1 && field "$work/peak-$1" mem_peak_bytes | tail -n 1
}
falls() { # the sharded part, 16 bytes a parameter, is 1/N of one rank's; the rest is the same except padding and what communication takes
    local N root=$(((384 + 8 + 2) * 16)) block=$((12 * 16 * 16 + 13 * 16)) measured expected S U fixed
    for N in 1 2 4 8; do
        S=$(($(shard $root $N) + 24 * $(shard $block $N))) U=$((N * (2 * $(shard $root $N) + 3 * $(shard $block $N))))
        measured=$(peak $N) || { cat "$work/peak.log"; return 1; }
        [ $N = 1 ] && fixed=$((measured - 16 * S - 4 * U))
        expected=$((16 * S + 4 * U + fixed + (N > 1 ? (4 << 20) + 64 : 0)))
        echo "$N rank(s): $measured bytes, expected $expected, of them $((16 * S)) sharded"
        [ "$measured" = $expected ] || return 1
    done
}
[ "$BUILD" != build ] || check "stage 3: the peak falls with the number of ranks as the formula says" falls
within_limit() { # 16 bytes for each of 2 million parameters are more than 25 MB; 4 bytes each and the gathered ones are less
    local big=(--model d10 --channels 128 --batch-size 1 --seq-len 8 --total-batch-size 0 --steps 1 --out= --memory-limit 0.025 --recompute none)
    fails_with "out of memory: .* are over --memory-limit 0.025 GB" "more ranks with ZeRO" -- on_ranks 4 "$ddp" "${small[@]}" "${big[@]}" &&
        on_ranks 4 "$zero" "${small[@]}" "${big[@]}" --zero-stage 3
}
check "a model that is too large for DDP on 4 ranks trains under stage 3 with the same limit" within_limit

# ---- ranks that fail ----
ends() { # PATTERN STAGE OPTION...: the run fails within a minute, and ranks 0 and 3 print the pattern
    local status
    timeout 60 $MPIRUN -np 4 "$zero" "${small[@]}" --total-batch-size 256 --model d5 --steps 20 --zero-stage "$2" "${@:3}" > "$work/log" 2>&1
    status=$?
    cat "$work/log"
    [ $status -ne 0 ] && [ $status -ne 124 ] && grep -q "^rank 0: error: .*$1" "$work/log" && grep -q "^rank 3: error: .*$1" "$work/log"
}
export OMP_NUM_THREADS=1
check "stage 3: a rank that is killed is named by the others" ends "rank 2 has died.* during step [67]" 3 --fault 2:7:kill
check "stage 2: a rank that hangs is named, with the operation it did not reach" patiently ends "rank 1 has not reached .*step 7" 2 --fault 1:7:hang
check "--zero-stage 4 is an error" fails_with "--zero-stage" "1" "3" -- "$zero" --zero-stage 4
done_testing
