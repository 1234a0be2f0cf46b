#!/bin/bash
# FSDP: in rank order losses, norms, weights and optimizer state are DDP's to the bit, for every way to shard, wrap, gather ahead,
# offload and recompute; each rank holds and sends as many bytes as the formulas say. The formulas are written here a second time,
# in plain numbers. The selection of settings contains every pair of values. 5 blocks in groups of 2 or 3 leave a smaller last group.
. test/lib.sh
small=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d5 --heads 2 --channels 16 --seq-len 16 --total-batch-size 0
    --lr 3e-3 --warmup-steps 2 --eval-every 0 --sample-every 0 --steps 6 --deterministic)
last=step_00000006 fsdp=$BUILD/train_gpt2_fsdp

# trains PROGRAM PRECISION RANKS OUT OPTION...: 4 sequences per rank and step, in A micro-batches
trains() {
    local out=$4
    rm -rf "$out"
    on_ranks "$3" "$(of "train_gpt2_$1" "$2")" "${small[@]}" --batch-size $((4 / A)) --total-batch-size $((64 * $3)) --out "$out" "${@:5}" \
        > "$out.log" 2>&1 < /dev/null || { tail -n 20 "$out.log"; return 1; } # settings are read from stdin
}
near() { # OUT OUT
    "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$1/$last/model.safetensors" "$2/$last/model.safetensors" --rtol 1e-5 --atol 1e-6
}
same() { same_run "$1" "$2" 00000006; } # OUT OUT
same_in_16_bits() { # OUT OUT: except the norm of the parameters, which DDP takes from the rounded ones
    "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --bits --only loss &&
        "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --bits --only grad_norm &&
        cmp "$1/$last/model.safetensors" "$2/$last/model.safetensors" && cmp "$1/$last/optimizer.safetensors" "$2/$last/optimizer.safetensors"
}
near_losses() { "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --rtol 1e-4 --only loss; } # OUT OUT

# ---- the setting at hand ----
# ranks wrap sharding prefetch forward rooms offload recompute mode, as below; X: bytes of a parameter as it is gathered, R: of a
# gradient as it is reduced, A: micro-batches a step.
X=4 R=4 A=1
columns="ranks wrap sharding prefetch forward rooms offload recompute mode"
options() {
    echo "--wrap-blocks $wrap --sharding $sharding --prefetch $prefetch --limit-all-gathers $rooms --recompute $recompute"
    [ $sharding = hybrid ] && echo "--shard-group ${group:-2}"
    [ $forward = yes ] || echo --no-forward-prefetch
    [ $offload = yes ] && echo --cpu-offload
    [ $R = 4 ] || echo "--reduce-dtype model"
}
setting() { # OUT [PRECISION OPTION...]: trains with the setting
    local run=
    [ $mode = strict ] && run=strict
    $run trains fsdp "${2-fp32}" $ranks "$1" $(options) "${@:3}"
}
as() { setting "$3" "${@:4}" && "$1" "$2" "$3"; } # COMPARISON DDP OUT [PRECISION OPTION...]

# ---- what a rank holds and sends ----
# 16 channels, 5 blocks, a vocabulary of 384 with its padding, 16 positions
root=$(((384 + 16 + 2) * 16)) block=$((12 * 16 * 16 + 13 * 16))
shards() { # sets S and replicas, and the elements of a rank's shards: r of the root's group, b of the first of `others` more, all
    local left=0
    S=$ranks
    case $sharding in none) S=1 ;; hybrid) S=${group:-2} ;; esac
    replicas=$((ranks / S))
    if [ $wrap = 0 ]; then r=$(shard $((root + 5 * block)) $S) b=0 others=0 all=$r; return; fi
    r=$(shard $root $S) b=$(shard $((wrap * block)) $S) others=$(((5 + wrap - 1) / wrap))
    [ $((5 % wrap)) = 0 ] || left=$(shard $((5 % wrap * block)) $S)
    all=$((r + 5 / wrap * b + left))
}
least() { echo $(($1 < $2 ? $1 : $2)); }
reshards() { [ $sharding = full ] || [ $sharding = hybrid ]; }
holds() { # OUT DDP: bytes of each kind; workspace, MPI's scratch and activations are DDP's, minus what is recomputed
    local gathered buckets communication activations host=0 parameters gradients moments total
    shards
    reshards && gathered=$((X * S * (r + $(least $rooms $others) * b))) || gathered=$((X * S * (r + others * b)))
    if [ $S$X$offload = 14no ]; then gathered=0; fi # a rank's shards are the whole parameters, and it computes with them
    buckets=$((S * (r + $(least 2 $others) * b) * (R > X ? X + 4 : X)))
    communication=$(($(field "$2" communication) + gathered + buckets))
    # two more communicators, with scratch as large as the world's; only the world has the number of 64 bytes
    [ $sharding = hybrid ] && communication=$((communication + ((S > 1) + (replicas > 1)) * ($(field "$2" communication) - 64)))
    activations=$(field "$2" activations)
    [ $recompute = none ] || activations=$((activations - 4 * 64 / A * (15 * 16 * X + (4 + 2) * 4))) # 4 of 5 blocks, their tokens
    parameters=$((4 * all)) gradients=$((R * all)) moments=$((8 * all))
    if [ $offload = yes ]; then
        host=$((parameters + gradients + moments + (A > 1 ? R * all : 0) + (X < 4 ? X * all : 0)))
        parameters=0 gradients=0 moments=0
    fi
    total=$((parameters + gradients + moments + activations + communication + $(field "$2" workspace)))
    echo "expected: parameters $parameters, gradients $gradients, optimizer $moments, activations $activations," \
        "communication $communication (gathered $gathered, buckets $buckets), on the host $host, in all $total"
    head -n 1 "$1/metrics.jsonl" | grep -o '"predicted_bytes":{[^}]*}'
    [ "$(field "$1" parameters)" = $parameters ] && [ "$(field "$1" gradients)" = $gradients ] &&
        [ "$(field "$1" "optimizer state")" = $moments ] && [ "$(field "$1" activations)" = $activations ] &&
        [ "$(field "$1" communication)" = $communication ] && [ "$(field "$1" "state on the host")" = $host ] &&
        [ "$(field "$1" mem_bytes | sort -u)" = $total ] && [ "$(field "$1" mem_peak_bytes | sort -u)" = $total ] && # as measured
        ! grep 'than predicted$' "$1.log"
}
sends() { # OUT: A(3P - 2root) + root elements, (S-1)/S of them, in grad-op (A+1)P, and what replicas sum, 2P/S (R-1)/R; three doubles
    local gathers bytes
    shards
    reshards && gathers=$((2 * A * (all - r) + r)) || gathers=$all # of a shard: in both passes, or once a step
    bytes=$((ranks * (S - 1) * (gathers * X + A * all * R) + 2 * S * (replicas - 1) * all * R))
    bytes=$(((bytes + 2 * (ranks - 1) * 8 + 2 * 2 * replicas * (S - 1) * 8) / ranks))
    echo "expected: $bytes bytes; measured: $(field "$1" comm_bytes | sort | uniq -c)"
    [ "$(field "$1" comm_bytes | sort -u)" = $bytes ] && [ "$(field "$1" comm_bytes | wc -l)" = 6 ] &&
        grep '^  bytes .*  as predicted$' "$1.log" # on every rank
}
as_by_formula() { # OUT DDP
    check "  each rank holds what the formula says, of each kind" holds "$1" "$2"
    check "  and sends what the formula says" sends "$1"
}

# ---- to the bit ----
settings() { cat << END
1 0 full none no 4 no none strict
1 1 grad-op backward-post no 4 yes block plain
1 2 grad-op none no 2 yes block plain
1 3 none backward-pre yes 2 no none plain
2 0 grad-op backward-post yes 4 no block strict
2 2 none backward-pre yes 4 no block plain
2 3 full backward-post no 2 yes block strict
3 0 none backward-post no 4 yes none plain
3 1 none none yes 2 no block strict
3 3 grad-op backward-post yes 4 no block strict
4 0 grad-op backward-pre no 2 no none plain
4 1 grad-op backward-pre yes 4 no block plain
4 2 none backward-post yes 4 no none strict
2 1 full none no 1 no none plain
3 2 full backward-pre yes 3 yes block strict
4 3 full none no 1 yes none strict
4 2 full backward-post no 2 no none strict
4 1 full backward-pre yes 2 no none strict
3 3 full backward-pre no 2 no block plain
2 0 full backward-post yes 4 yes none plain
END
}
every_two_meet() { # each value of a column with each of every other; rooms only 2 and 4, because some settings exclude 1 and 3
    settings | awk '{ for (i = 1; i <= NF; i++) if (i != 6 || $i % 2 == 0) { values[i, $i]; for (j = 1; j < i; j++) met[i, $i, j, $j] } }
        END { for (a in values) for (b in values) {
                  split(a, x, SUBSEP); split(b, y, SUBSEP)
                  if (x[1] > y[1] && !((x[1], x[2], y[1], y[2]) in met)) { print x[2], "and", y[2], "do not meet"; bad = 1 }
              }
              exit bad }'
}
check "every two settings meet" every_two_meet
tried() { # each setting against DDP on as many ranks
    local ranks wrap sharding prefetch forward rooms offload recompute mode name
    while read -r $columns; do
        [ "$BUILD" = build ] || [ $ranks-$wrap = 3-2 ] || continue # for the sanitizers
        if [ ! -e "$work/ddp-$ranks" ]; then check "$ranks rank(s): DDP" trains ddp fp32 $ranks "$work/ddp-$ranks"; fi
        name="$sharding, --wrap-blocks $wrap, $prefetch"
        [ $forward = no ] || name="$name and forward"
        name="$name, $rooms rooms"
        [ $offload = no ] || name="$name, offload"
        [ $recompute = none ] || name="$name, recompute"
        check "$ranks rank(s): $name, $mode, is DDP to the bit" as same "$work/ddp-$ranks" "$work/fsdp"
        as_by_formula "$work/fsdp" "$work/ddp-$ranks"
    done
}
tried < <(settings)

# ---- hybrid: 2 groups of 2 ranks, whose sums round differently from those of all 4 ranks ----
hybrid() {
    local ranks wrap sharding prefetch forward rooms offload recompute mode first=
    [ -e "$work/ddp-4" ] || check "4 ranks: DDP" trains ddp fp32 4 "$work/ddp-4"
    while read -r $columns; do
        check "hybrid, 2 x 2 ranks, --wrap-blocks $wrap, $prefetch, forward $forward, offload $offload, recompute $recompute, $mode" \
            as near "$work/ddp-4" "$work/hybrid$first"
        [ -z "$first" ] || check "  and the bits of the hybrid before" same "$work/hybrid" "$work/hybrid$first"
        as_by_formula "$work/hybrid$first" "$work/ddp-4"
        first=-next
        [ "$BUILD" = build ] || return
    done
}
hybrid << END
4 1 hybrid backward-pre yes 3 no block strict
4 2 hybrid backward-post no 2 yes none strict
4 0 hybrid none yes 2 no none plain
4 3 hybrid none no 1 yes block plain
END
degenerate() { # GROUP: hybrid with one group is the same as full, with groups of one rank the same as DDP
    local ranks=4 wrap=2 sharding=hybrid prefetch=backward-pre forward=no rooms=2 offload=no recompute=none mode=strict group=$1
    setting "$work/fsdp" && same "$work/ddp-4" "$work/fsdp" && holds "$work/fsdp" "$work/ddp-4" && sends "$work/fsdp"
}
if [ "$BUILD" = build ]; then
    check "hybrid with a group of all 4 ranks has DDP's bits" degenerate 4
    check "  and with groups of one rank" degenerate 1
fi

# ---- accumulation: FSDP reduces every micro-batch and adds up, DDP reduces the sum once ----
accumulated() {
    local ranks wrap sharding prefetch forward rooms offload recompute mode A=4
    while read -r $columns; do
        [ "$BUILD" = build ] || [ $wrap = 2 ] || continue
        if [ ! -e "$work/ddp-$ranks-4" ]; then check "$ranks rank(s), 4 micro-batches: DDP" trains ddp fp32 $ranks "$work/ddp-$ranks-4"; fi
        check "$ranks rank(s), 4 micro-batches, $sharding, --wrap-blocks $wrap, offload $offload: nearly" as near "$work/ddp-$ranks-4" "$work/fsdp"
        as_by_formula "$work/fsdp" "$work/ddp-$ranks-4"
    done
}
accumulated << END
3 2 full backward-post yes 2 yes block strict
3 2 grad-op backward-pre yes 2 no none strict
4 3 hybrid backward-post no 2 yes none plain
END
for_tier rest
accumulated << END
3 1 full backward-pre no 2 no none strict
3 3 full none no 1 no none strict
3 0 grad-op none no 2 no none plain
3 1 none backward-pre no 2 no none plain
4 1 hybrid backward-pre no 2 no none strict
1 1 full backward-pre no 2 no none plain
END
for_tier quick

# ---- 16 bits: if reduced in the model's precision, equal to the bit; if reduced in fp32, nearly, and with more bytes ----
in_16_bits() { # PRECISION OPTION...
    local ranks wrap sharding prefetch forward rooms offload recompute mode precision=$1 X=2 R=2
    while read -r $columns; do
        [ "$BUILD" = build ] || [ $ranks = 3 ] || continue
        check "$precision, $ranks rank(s): DDP" trains ddp $precision $ranks "$work/$precision" "${@:2}"
        R=2
        check "  $sharding, --wrap-blocks $wrap, $prefetch, offload $offload, to the bit" as same_in_16_bits "$work/$precision" "$work/fsdp" $precision "${@:2}"
        as_by_formula "$work/fsdp" "$work/$precision"
        [ $precision = bf16 ] || continue # in fp16 it skips other steps: sums that overflow in fp16 fit in fp32
        R=4
        check "  reduced in fp32, within a fortieth of bf16's roundoff" as near_losses "$work/$precision" "$work/fsdp" $precision
        as_by_formula "$work/fsdp" "$work/$precision"
    done
}
in_16_bits bf16 << END
3 2 full backward-pre yes 2 no none strict
END
if [ "$BUILD" = build ]; then
    for_tier rest
    in_16_bits bf16 << END
2 3 grad-op backward-post no 2 yes block plain
4 0 none none no 2 no none plain
END
    # the first scales are too large for gradients in fp16, so all skip steps
    in_16_bits fp16 --loss-scale 8388608 --max-bad-steps 20 << END
3 2 full backward-pre no 2 yes none strict
1 1 full none no 2 no block plain
END
    for_tier quick
fi

# ---- between steps: validation and samples also gather, in another order than training ----
samples_of() { sed -n '/^sample/,/^step\|^saved/p' "$1" | grep -v '^step\|^saved'; } # LOG
deep=(--val-data $REFERENCE/tokens.bin --eval-every 2 --eval-steps 3 --sample-every 3 --sample-tokens 20 --check-every 2)
says_the_same() { # OPTION...
    strict trains fsdp fp32 3 "$work/fsdp" "${deep[@]}" "$@" && same "$work/ddp" "$work/fsdp" &&
        cmp <(samples_of "$work/ddp.log") <(samples_of "$work/fsdp.log")
}
drew() { samples_of "$work/ddp.log" | grep -c "^sample after" | grep -qx 2; }
if [ "$BUILD" = build ]; then
    for_tier both
    check "3 ranks: DDP with evaluations and samples" trains ddp fp32 3 "$work/ddp" "${deep[@]}"
    for_tier quick
    check "  which draws two samples" drew
    check "  full, with both prefetches into 3 rooms, says the same" says_the_same --limit-all-gathers 3
    check "  with offload, by 2 blocks" says_the_same --cpu-offload --prefetch backward-post --wrap-blocks 2
    for_tier rest
    check "  by 3 blocks, in one room" says_the_same --wrap-blocks 3 --prefetch none --no-forward-prefetch --limit-all-gathers 1
    check "  grad-op says the same" says_the_same --sharding grad-op
    check "  grad-op by 2 blocks" says_the_same --sharding grad-op --wrap-blocks 2
    check "  the whole model at once" says_the_same --wrap-blocks 0
    check "  --sharding none says the same" says_the_same --sharding none --wrap-blocks 0
    for_tier quick
fi

# ---- rooms: gathering ahead is bounded ----
peak_with() { # WRAP ROOMS OPTION...
    trains fsdp fp32 2 "$work/rooms" --steps 1 --wrap-blocks "$1" --limit-all-gathers "${@:2}" > "$work/rooms.check" || { cat "$work/rooms.check"; return 1; }
    field "$work/rooms" mem_peak_bytes
}
a_room_each() { # WRAP GROUPS: one room more adds the parameters of WRAP blocks, up to the number of groups besides the root's
    local first n peak expected
    first=$(peak_with "$1" 1 --prefetch none --no-forward-prefetch) || return 1
    for n in 2 3 5 6; do
        peak=$(peak_with "$1" $n) || return 1
        expected=$((first + ((n < $2 ? n : $2) - 1) * 4 * 2 * $(shard $(($1 * block)) 2)))
        echo "$n rooms: $peak bytes, expected $expected"
        [ "$peak" = $expected ] || return 1
    done
}
if [ "$BUILD" = build ]; then
    check "the peak grows by one block's parameters per --limit-all-gathers" a_room_each 1 5
    check "  by 2 blocks' with --wrap-blocks 2" a_room_each 2 3
fi

# ---- when gathers are issued: operations are numbered in the order of issue ----
traces() { trains fsdp fp32 2 "$work/traced" --wrap-blocks 2 --steps 2 --trace "$work/trace.json" "$@"; }
issued() { # RANK: prints "number kind time" of each operation of step 2
    sed -n '/"tid":1,.*"step":2/{N;s/.*"name":"\([a-z-]*\) #\([0-9]*\).*"ph":"s".*"pid":'$1',.*"ts":\([0-9.]*\)}.*/\2 \1 \3/p}' "$work/trace.json" | sort -n
}
# PATTERN: the operations of the backward pass; G a gather, R a reduction. Blocks 0 and 1, 2 and 3, and 4 are a group each, the root
# is another. The root is gathered in the previous step's update, and in this step's update for the next step.
order_is() {
    local rank
    for rank in 0 1; do
        issued $rank | awk '{ printf "%s", $2 == "all-gather" ? "G" : $2 == "reduce-scatter" ? "R" : "" }' > "$work/order"
        echo "rank $rank: $(cat "$work/order")"
        grep -qxE "G{4}$1G" "$work/order" || return 1
    done
}
gathers_in() { # SLICE NUMBER: each rank issues NUMBER gathers while it computes SLICE
    local rank
    for rank in 0 1; do
        sed -n 's/.*"name":"\([^"]*\)","ph":"X","pid":'$rank',"tid":0,"ts":\([0-9.]*\),"dur":\([0-9.]*\),.*"step":2.*/\2 \3 \1/p' "$work/trace.json" > "$work/compute"
        issued $rank | awk -v slice="$1" 'FNR == NR { name = $0; sub("^[^ ]* [^ ]* ", "", name); if (name == slice) { begin[++n] = $1; end[n] = $1 + $2 } next }
            $2 == "all-gather" { for (i = 1; i <= n; i++) if ($3 >= begin[i] && $3 <= end[i]) count++ }
            END { print 0 + count }' "$work/compute" - > "$work/count"
        echo "rank $rank: $(cat "$work/count") gathers within $1"
        [ "$(cat "$work/count")" = $2 ] || return 1
    done
}
if [ "$BUILD" = build ]; then
    check "by 2 blocks: backward-pre" traces
    check "  gathers a group before any gradient of the one before it is reduced" order_is "GGRGRRR"
    check "  during the backward pass of that one's last block" eval 'gathers_in "backward, block 4" 1 && gathers_in "backward, block 3" 1 &&
        gathers_in "backward, block 2" 0 && gathers_in "backward, block 1" 0'
    check "  and gathers one group ahead in the forward pass" eval 'gathers_in "forward, block 0" 1 && gathers_in "forward, block 1" 0 &&
        gathers_in "forward, block 2" 1 && gathers_in "forward, block 4" 0'
    check "by 2 blocks: backward-post" traces --prefetch backward-post
    check "  gathers it once all gradients are there, before they are reduced" order_is "GGRGRRR"
    check "  during the backward pass of the same group's first block" eval 'gathers_in "backward, block 4" 2 && gathers_in "backward, block 3" 0 &&
        gathers_in "backward, block 2" 1 && gathers_in "backward, block 1" 0 && gathers_in "backward, block 0" 0'
    check "by 2 blocks: no prefetch" traces --prefetch none --no-forward-prefetch
    check "  gathers it after all reductions" order_is "GRGRGRR"
    check "  during its own backward pass" eval 'gathers_in "backward, block 4" 1 && gathers_in "backward, block 3" 1 &&
        gathers_in "backward, block 2" 0 && gathers_in "backward, block 1" 1'
    check "  and gathers a group when it is needed in the forward pass" eval 'gathers_in "forward, block 0" 1 && gathers_in "forward, block 1" 0 &&
        gathers_in "forward, block 2" 1 && gathers_in "forward, block 4" 1'
    check "by 2 blocks: three rooms" traces --limit-all-gathers 3
    check "  gather two groups ahead in the backward pass" order_is "GGGRRRR"
    check "  and in the forward pass" eval 'gathers_in "forward, block 0" 1 && gathers_in "forward, block 2" 0 && gathers_in "forward, block 4" 0'
    check "each of 3 blocks by itself: backward-pre" traces --model d3 --wrap-blocks 1
    check "  gathers a block before any gradient of the one before it is reduced" order_is "GGRGRRR"
    check "  during that one's backward pass" eval 'gathers_in "backward, block 2" 1 && gathers_in "backward, block 1" 1 && gathers_in "backward, block 0" 0'
    check "  and gathers one block ahead in the forward pass" eval 'gathers_in "forward, block 0" 1 && gathers_in "forward, block 1" 1 && gathers_in "forward, block 2" 0'
fi

# ---- against PyTorch's runs, summed by the library, with 2 micro-batches ----
is_pytorchs() { # RANKS OPTION...
    local stored=$REFERENCE/ddp/ranks_$1_accumulate_2
    rm -rf "$work/run"
    on_ranks "$1" "$fsdp" "${reference_options[@]}" --batch-size $((8 / $1)) --out "$work/run" "${@:2}" &&
        "$COMPARE" metrics "$stored.jsonl" "$work/run/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$stored.safetensors" "$work/run/step_00000020/model.safetensors" --rtol 1e-5 --atol 1e-6
}
if [ "$BUILD" = build ]; then
    check "4 ranks have PyTorch's losses, norms and weights" is_pytorchs 4
    check "  hybrid, with offload" is_pytorchs 4 --sharding hybrid --shard-group 2 --cpu-offload
    check "  2 ranks by 2 blocks, grad-op" is_pytorchs 2 --wrap-blocks 2 --sharding grad-op
fi

# ---- the purpose: a model that does not fit otherwise ----
within_limit() { # 16 bytes for each of 2 million parameters are more than 25 MB; 4 bytes each and the gathered ones are less
    local big=(--model d10 --channels 128 --batch-size 1 --seq-len 8 --steps 1 --memory-limit 0.025 --recompute none)
    fails_with "out of memory: .* are over --memory-limit 0.025 GB" "more ranks with ZeRO or FSDP" -- on_ranks 4 "$BUILD/train_gpt2_ddp" "${small[@]}" "${big[@]}" &&
        on_ranks 4 "$fsdp" "${small[@]}" "${big[@]}"
}
[ "$BUILD" = build ] && check "a model that is too large for DDP on 4 ranks trains under the same limit" within_limit

# ---- ranks that fail, and options that do not go together ----
ends() { # PATTERN OPTION...: the run fails within a minute, and ranks 0 and 3 print the pattern
    local status
    timeout 60 $MPIRUN -np 4 "$fsdp" "${small[@]}" --batch-size 4 --steps 20 "${@:2}" > "$work/log" 2>&1 < /dev/null
    status=$?
    cat "$work/log"
    [ $status -ne 0 ] && [ $status -ne 124 ] && grep -q "^rank 0: error: .*$1" "$work/log" && grep -q "^rank 3: error: .*$1" "$work/log"
}
killed_in_a_step() { # at some moment of a step after the first
    local pid status
    rm -f "$work"/pid.* "$work/log" # files of an earlier run would be taken for this run's
    timeout 60 $MPIRUN -np 3 bash -c 'echo $$ > "$0.$OMPI_COMM_WORLD_RANK"; exec "$@"' "$work/pid" "$fsdp" "${small[@]}" --batch-size 4 \
        --channels 128 --steps 1000 > "$work/log" 2>&1 < /dev/null & pid=$!
    until grep -qs "^step  *[2-9]/" "$work/log"; do kill -0 $pid 2> /dev/null || break; sleep 0.1; done
    kill -9 "$(cat "$work/pid.1")"
    SECONDS=0
    wait $pid
    status=$?
    tail -n 20 "$work/log"
    [ $status -ne 0 ] && [ $SECONDS -lt 30 ] && grep -q "^rank 0: error: rank 1 has died" "$work/log" && grep -q "^rank 2: error: rank 1 has died" "$work/log"
}
export OMP_NUM_THREADS=1
if [ "$BUILD" = build ]; then # a rank may notice the death before it has begun the step
    check "a rank that is killed is named by the others" ends "rank 2 has died.* during step [67]" --fault 2:7:kill
    check "  also with offload, in hybrid" ends "rank 2 has died.* during step [67]" --fault 2:7:kill --sharding hybrid --shard-group 2 --cpu-offload
    check "  and in the middle of a step" killed_in_a_step
    check "hybrid: a rank that hangs is named, with the operation it did not reach" \
        patiently ends "rank 1 has not reached .*step 7" --fault 1:7:hang --sharding hybrid --shard-group 2
    check "hybrid: replicas that differ are found" ends "differ" --fault 1:7:bitflip --check-every 1 --sharding hybrid --shard-group 2
fi
refuses() { fails_with "$1" -- "$fsdp" "${small[@]}" "${@:2}"; }
check "--shard-group without hybrid is an error" refuses "--shard-group and --sharding hybrid go together" --shard-group 1
check "  hybrid without --shard-group" refuses "--shard-group and --sharding hybrid go together" --sharding hybrid
check "  a group that does not divide the ranks" refuses "3 does not divide 1" --sharding hybrid --shard-group 3
check "  one room, and prefetch" refuses "--limit-all-gathers 1 leaves no room to gather ahead: allow 2, or --prefetch none" --limit-all-gathers 1
check "  --limit-all-gathers 0" refuses "limit-all-gathers" --limit-all-gathers 0
check "  --wrap, which was an option once" refuses "unknown option '--wrap'" --wrap block
check "  --wrap-blocks -1" refuses "--wrap-blocks" --wrap-blocks -1
check "  --wrap-blocks 257" refuses "--wrap-blocks" --wrap-blocks 257
check "  an unknown --checkpoint" refuses "full|sharded" --checkpoint half
done_testing
