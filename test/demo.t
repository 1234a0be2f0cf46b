#!/bin/bash
# The demo on a tiny model, and dev/plot.sh: what is plotted is what the metrics say.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }

demo() {
    ln -s "$PWD/$BUILD/train_gpt2_single" "$work/train_gpt2_single"
    BUILD=$work sh dev/demo.sh --model d1 --channels 16 --seq-len 16 --batch-size 4 --steps 4 --eval-every 2 --eval-steps 1 \
        --sample-every 2 --sample-tokens 8 > "$work/demo.out" || return 1
    cat "$work/demo.out"
    [ -s "$work/demo/metrics.jsonl" ] && [ -d "$work/demo/step_00000004" ] && grep -q 'sample after step 4' "$work/demo.out" &&
        grep -q "^checkpoint: $work/demo/step_00000004$" "$work/demo.out" && grep -q '^validation loss: .* at the end' "$work/demo.out"
}
its_command_goes_on() {
    sh -c "$(tail -n 1 "$work/demo.out")" > "$work/on.out" || return 1
    cat "$work/on.out"
    [ -d "$work/demo/step_00000008" ]
}

# Two runs with known losses: a null, a torn last line, spaces, and the run's own line with numbers that are not losses.
mkdir "$work/first" "$work/second_run"
cat > "$work/first/metrics.jsonl" <<'END'
{"run":{"options":{"step":77,"loss":99},"step":78,"loss":98}}
{"step":0,"val_loss":5.5}
{"step":1,"loss":5.25,"grad_norm":44}
{"step":2,"loss":null,"grad_norm":null}
{"step": 3, "loss": 4.5e0, "grad_norm": 43}
{"step":3,"val_loss":4.75}
{"step":4,"loss":4.
END
echo '{"step":1,"loss":6.125}' > "$work/second_run/metrics.jsonl"
# A gnuplot that keeps the numbers it was given, then draws.
mkdir "$work/bin"
cat > "$work/bin/gnuplot" <<END
#!/bin/sh
cp "\$(dirname "\$1")"/*.training "\$(dirname "\$1")"/*.validation "$work/seen" && exec $(command -v gnuplot) "\$@"
END
chmod +x "$work/bin/gnuplot"
plot() { rm -rf "$work/seen"; mkdir "$work/seen"; PATH="$work/bin:$PATH" sh dev/plot.sh "$@" | tee "$work/plot.out"; }
is_png() { [ "$(head -c 4 "$1" | tail -c 3)" = PNG ]; }
same() { [ "$1" = "$2" ] || { echo "it is '$1' and should be '$2'"; return 1; }; }

one_run() {
    plot "$work/first/metrics.jsonl" && is_png "$work/first/loss.png" && grep -q "^plot: $work/first/loss.png$" "$work/plot.out" &&
        grep -q 'first: training' "$work/plot.out" && same "$(cat "$work/seen/1.training")" "$(printf '1 5.25\n3 4.5e0')" &&
        same "$(cat "$work/seen/1.validation")" "$(printf '0 5.5\n3 4.75')"
}
two_runs() {
    plot "$work/first/metrics.jsonl" "$work/second_run/metrics.jsonl" "$work/both.png" && is_png "$work/both.png" &&
        grep -q 'second_run: training' "$work/plot.out" && same "$(cat "$work/seen/2.training")" "1 6.125" &&
        same "$(cat "$work/seen/2.validation")" ""
}
if [ -x "$BUILD/train_gpt2_single" ] && [ -e data/train.bin ]; then
    check "the demo trains, samples, saves a checkpoint and says where it is" demo
    check "the command that it gives to train on works" its_command_goes_on
else
    skip "the demo trains" "make train_gpt2_single was not run"
fi
if command -v gnuplot > /dev/null; then
    check "a run's losses are plotted as they are, without nulls, torn lines and the options" one_run
    check "several runs are plotted together, each by its folder's name" two_runs
    check "a file that is not there is named" fails_with "no_such.jsonl cannot be read" -- sh dev/plot.sh "$work/no_such.jsonl"
    check "a file without losses is named" fails_with "README.md has no losses" -- sh dev/plot.sh README.md
    check "a picture that cannot be written is an error" fails_with "/no/such/folder/a.png was not made" -- sh dev/plot.sh "$work/first/metrics.jsonl" /no/such/folder/a.png
    check "a picture without a run is an error" fails_with "no metrics.jsonl was given" -- sh dev/plot.sh "$work/a.png"
else
    skip "losses are plotted" "there is no gnuplot"
fi
done_testing
