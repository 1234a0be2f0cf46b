#!/bin/bash
# dev/bench/scaling.sh: which runs it starts, and what it computes from their numbers.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }

# A program of known speed: 100 tokens/s on one rank, 150 on two, 240 on four; its first step is slow.
cat > "$work/program" <<'END'
#!/bin/bash
N=$OMPI_COMM_WORLD_SIZE
[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exit 0
echo "device     CPU, 1 thread"
while [ $# -gt 0 ]; do case $1 in --out) out=$2 ;; --batch-size) batch=$2 ;; esac; shift; done
speed=$(case $N in 1) echo 100 ;; 2) echo 150 ;; 4) echo 240 ;; esac)
echo '{"run":{"step":1,"loss":0,"tokens_per_s":7}}' > "$out/metrics.jsonl"
for step in 1 2 3; do
    echo "{\"step\":$step,\"loss\":5.5,\"tokens_per_s\":$((step == 1 ? 1 : speed + step)).5,\"step_ms\":200,\"comm_exposed_ms\":$((10 * N))}"
done >> "$out/metrics.jsonl"
echo '{"step":3,"val_loss":5.5}' >> "$out/metrics.jsonl"
echo "$N $batch" >> "$RUNS"
END
chmod +x "$work/program"
export RUNS=$work/runs
scaling() { PROGRAM=$work/program sh dev/bench/scaling.sh "$@"; }
runs_and_numbers() {
    scaling --ranks "1 2 4" --batch-size 2 --steps 3 --out "$work/out" > "$work/said" || return 1
    cat "$work/said" "$RUNS"
    # strong with 8, 4 and 2 sequences on a rank, weak with 2
    [ "$(sort "$RUNS" | tr '\n' ' ')" = "1 2 1 8 2 2 2 4 4 2 " ] && [ "$(grep -c '^    1         103      1.00       100 %      5 %' "$work/said")" = 2 ] &&
        [ "$(grep -c '^    4         243      2.36        59 %     20 %' "$work/said")" = 2 ]
}
check "medians without the first step, speed-up, efficiency and the exposed share" runs_and_numbers
beyond_cores() { scaling --ranks "1 4" --batch-size 2 --steps 3 > "$work/said" && cat "$work/said" && [ "$(grep -c 'they cannot gain' "$work/said")" -eq $(($(getconf _NPROCESSORS_ONLN) < 4)) ]; }
check "a note says that more ranks than cores take turns" beyond_cores
real_runs() {
    PROGRAM=$BUILD/train_gpt2_ddp sh dev/bench/scaling.sh --ranks "1 2" --batch-size 2 --steps 3 --out "$work/real" --data $REFERENCE/tokens.bin \
        --model d1 --channels 16 --heads 2 --seq-len 16 > "$work/said" || return 1
    cat "$work/said"
    [ "$(grep -cE '^ +[12] +[1-9][0-9]* +[0-9.]+ +[0-9]+ % +[0-9]+ %$' "$work/said")" = 4 ]
}
check "the training program is measured" real_runs
if command -v gnuplot > /dev/null; then
    check "a plot in the terminal and as a PNG" eval 'grep -q "strong *s" "$work/said" && [ "$(head -c 4 "$work/real/scaling.png" | tail -c 3)" = PNG ]'
else
    skip "a plot" "there is no gnuplot"
fi
check "a batch that does not divide over the ranks is an error" fails_with "4 sequences does not divide over 3" -- scaling --ranks "1 3 4" --batch-size 1
check "ranks that do not grow are an error" fails_with "must grow" -- scaling --ranks "2 1"
check "a word for the number of steps is an error" fails_with "not 'many'" -- scaling --steps many
check "a run that fails is an error, with its output" fails_with "strong on 1 ranks failed" "no such option\|unknown\|--no-such-option" -- \
    env PROGRAM=$BUILD/train_gpt2_ddp sh dev/bench/scaling.sh --no-such-option 1
done_testing
