#!/bin/bash
# The demo on a tiny model, dev/bench/zero_memory.sh's table, and dev/bench/plot.sh: what is plotted is what the metrics say.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }

small_model=(--model d2 --channels 16 --heads 2 --seq-len 16)
demo() {
    ln -s "$PWD/$BUILD/train_gpt2_ddp" "$PWD/$BUILD/train_gpt2_zero" "$work"
    BUILD=$work sh dev/demo.sh "${small_model[@]}" --batch-size 4 --steps 4 --eval-every 2 --eval-steps 1 \
        --sample-every 2 --sample-tokens 8 > "$work/demo.out" || return 1
    cat "$work/demo.out"
    [ -s "$work/demo/metrics.jsonl" ] && [ -d "$work/demo/step_00000004" ] && grep -q 'sample after step 4' "$work/demo.out" &&
        grep -q '^zero       stage 3: each rank keeps 1/4 of' "$work/demo.out" && grep -q "^checkpoint: $work/demo/step_00000004$" "$work/demo.out" &&
        grep -q '^validation loss: .* at the end' "$work/demo.out" && [ "$(grep -cE '^    4 (ddp|zero [123]) ' "$work/demo.out")" = 4 ]
}
its_command_goes_on() {
    sh -c "$(tail -n 1 "$work/demo.out")" > "$work/on.out" || return 1
    cat "$work/on.out"
    [ -d "$work/demo/step_00000008" ]
}

# The table, of programs that print and write what they are told: 1000 parameters, of which a rank of 4 keeps 260 in a shard.
cat > "$work/program" <<'END'
#!/bin/bash
[ "${OMPI_COMM_WORLD_RANK:-0}" = 0 ] || exit 0
stage=0
while [ $# -gt 0 ]; do case $1 in --zero-stage) stage=$2 ;; --out) out=$2 ;; esac; shift; done
N=$OMPI_COMM_WORLD_SIZE
[ "$stage" != "$FAILS" ] || { echo "error: 8 bytes more than predicted" >&2; exit 1; }
shard=$((N == 1 ? 1000 : 260))
parameters=$((stage < 3 ? 4000000 : 4000 * shard)) gradients=$((stage < 2 ? 4000000 : 4000 * shard)) optimizer=$((stage < 1 ? 8000000 : 8000 * shard))
mkdir -p "$out"
echo "model      of nobody"
{
    echo '{"run":{"precision":"fp32","parameters":77,"predicted_bytes":{"parameters":'$parameters',"gradients":'$gradients',"optimizer state":'$optimizer',"activations":300000,"communication":'$stage'00000,"workspace":200000},"options":{"batch-size":2,"seq-len":8}}}'
    echo '{"step":1,"tokens":'$((3 * 16 * N))',"tokens_per_s":5.0,"mem_bytes":1,"mem_peak_bytes":'$((stage * 100000 + 20500000))',"comm_bytes":'$((stage * 1000000))'}'
} > "$out/metrics.jsonl"
END
chmod +x "$work/program"
mkdir "$work/told"
ln -s "$work/program" "$work/told/train_gpt2_ddp"
ln -s "$work/program" "$work/told/train_gpt2_zero"
# Three micro-batches: 2, 2, 4 and 9 numbers for each parameter, times (N-1)/N.
cat > "$work/expected" <<'END'
of nobody
fp32; MB per rank

ranks stage  parameters gradients optimizer    state formula communication  other   total micro   sent formula
    1 ddp           4.0       4.0       8.0  100.0 % 100.0 %           0.0    0.5    20.5     3  0.000   0.000
    1 zero 1        4.0       4.0       8.0  100.0 % 100.0 %           0.1    0.5    20.6     3  0.250   0.000
    1 zero 2        4.0       4.0       8.0  100.0 % 100.0 %           0.2    0.5    20.7     3  0.500   0.000
    1 zero 3        4.0       4.0       8.0  100.0 % 100.0 %           0.3    0.5    20.8     3  0.750   0.000

    4 ddp           4.0       4.0       8.0  100.0 % 100.0 %           0.0    0.5    20.5     3  0.000   1.500
    4 zero 1        4.0       4.0       2.1   63.0 %  62.5 %           0.1    0.5    20.6     3  0.250   1.500
    4 zero 2        4.0       1.0       2.1   44.5 %  43.8 %           0.2    0.5    20.7     3  0.500   3.000
    4 zero 3        1.0       1.0       2.1   26.0 %  25.0 %           0.3    0.5    20.8     3  0.750   6.750

END
echo "picture: $work/bars.svg" >> "$work/expected"
the_table() {
    BUILD=$work/told sh dev/bench/zero_memory.sh --ranks "1 4" --svg "$work/bars.svg" | diff "$work/expected" - || return 1
    # a legend of five, and five parts of each of eight bars
    [ "$(grep -o 'fill="#[0-9a-f]*"' "$work/bars.svg" | grep -vc cccccc)" = 45 ] && grep -q '>4 ranks</text>' "$work/bars.svg" &&
        [ "$(tail -n 1 "$work/bars.svg")" = "</svg>" ]
}
not_as_predicted() { FAILS=2 BUILD=$work/told fails_with "8 bytes more than predicted" "train_gpt2_zero on 4 rank" -- sh dev/bench/zero_memory.sh --ranks 4; }
real_table() {
    BUILD=$BUILD sh dev/bench/zero_memory.sh --ranks "2 3" "${small_model[@]}" --batch-size 2 --total-batch-size 192 > "$work/table" || return 1
    cat "$work/table"
    # what was sent is what the formula says, except the padding of shards and three numbers a step
    awk '/^ *[23] (ddp|zero)/ { n++; if ($NF == 0 || $(NF - 1) / $NF > 1.02 || $(NF - 1) / $NF < 0.999) exit 1 } END { exit n != 8 }' "$work/table"
}
# ---- how ranks are started ----
# says_launcher RANKS UID VERSION: what dev/on_ranks.sh decides for this user, where mpirun says that it is this
says_launcher() {
    mkdir -p "$work/fakes"
    printf '#!/bin/sh\necho "%s"\n' "$3" > "$work/fakes/mpirun"
    printf '#!/bin/sh\necho %s\n' "$2" > "$work/fakes/id"
    printf '#!/bin/sh\necho 2\n' > "$work/fakes/getconf"
    chmod +x "$work/fakes"/*
    env -u MPIRUN PATH="$work/fakes:$PATH" sh -c '. dev/on_ranks.sh; ranks_launcher '"$1"'; echo "$launcher; $launcher_why"' | tee "$work/launcher.said"
}
decides() { says_launcher "${@:2}" && grep -qx -e "$1" "$work/launcher.said"; }
says_how() { # in a line of its own, and what MPIRUN says counts
    BUILD=$BUILD sh dev/bench/zero_memory.sh --ranks 1 "${small_model[@]}" 2> "$work/said" > /dev/null || { cat "$work/said"; return 1; }
    cat "$work/said"
    grep -qx "ranks are started by: $MPIRUN -np 1  (MPIRUN says so)" "$work/said"
}
check "root's ranks are started by mpirun with an option that allows it" \
    decides 'mpirun --allow-run-as-root --oversubscribe --bind-to none; you are root; there are more ranks than the 2 cores' 4 0 "mpirun (Open MPI) 4.1.4"
check "  those of other users without" decides 'mpirun --oversubscribe --bind-to none; there are more ranks than the 2 cores' 4 1000 "mpirun (Open MPI) 5.0.11"
check "  and where there are cores enough no reason is given" decides 'mpirun --oversubscribe --bind-to none; ' 2 1000 "mpirun (Open MPI) 5.0.11"
check "  another MPI's mpirun gets no options of Open MPI's" decides 'mpirun; ' 4 0 "HYDRA build details: Version: 4.0"
# launcher TEXT: a launcher that says no, in these words.
launcher() { printf '#!/bin/sh\necho "%s" >&2\nexit 1\n' "$1" > "$work/launcher"; chmod +x "$work/launcher"; }
no_launcher() { MPIRUN="no_such_mpirun --fast" BUILD=$BUILD fails_with "there is no no_such_mpirun" "dev/setup.sh" -- sh dev/bench/zero_memory.sh --ranks 2; }
refuses_root() {
    launcher "mpirun has detected an attempt to run as root."
    MPIRUN=$work/launcher BUILD=$BUILD fails_with "an attempt to run as root" "MPIRUN=.mpirun --allow-run-as-root" -- sh dev/demo.sh
}
refuses_ranks() {
    launcher "There are not enough slots available in the system to satisfy the 4 slots"
    MPIRUN="$work/launcher -x" BUILD=$BUILD fails_with "not enough slots" "refuses 4 ranks" MPIRUN=.*--oversubscribe -- sh dev/demo.sh
}

refuses_anything() {
    launcher "prterun was unable to find a network"
    MPIRUN="$work/launcher" BUILD=$BUILD fails_with "did not start 4 ranks; make doctor" "unable to find a network" -- sh dev/demo.sh &&
        [ "$(grep -n 'did not start' "$work/stderr" | cut -d : -f 1)" = 1 ] # our words come first
}

# ---- README's table ----
small_table() {
    BUILD=$BUILD sh dev/bench/readme_table.sh --rounds 1 --steps 3 "${small_model[@]}" > "$work/readme" || return 1
    cat "$work/readme"
    [ "$(grep -cE '^\| (DDP|ZeRO stage [123]|FSDP|(tensor|pipeline) parallel) \| [0-9]+ MB \| [0-9.]+ MB \| x [0-9.]+ \| [0-9.]+ % \|$' "$work/readme")" = 7 ] &&
        grep -qE '^\| DDP, gradients in int8 \| [0-9]+ MB \| [0-9.]+ MB \| x [0-9.]+ \| [0-9.]+ % \|$' "$work/readme" &&
        grep -qE '^\| mesh, `dp=2`, ZeRO stage 1 \| [0-9]+ MB \| [0-9.]+ MB \| x [0-9.]+ \| [0-9.]+ % \|$' "$work/readme" &&
        grep -qE '^\| single \| [0-9]+ MB \| \| 1 \| \|$' "$work/readme"
}

tp_table() { # its first line is what the others are compared with
    BUILD=$BUILD sh dev/bench/readme_table.sh --table tp --rounds 1 --steps 3 "${small_model[@]}" > "$work/readme" || return 1
    cat "$work/readme"
    [ "$(grep -cE '^\| (tensor parallel|`--[-a-z ]*`) \| [0-9]+ MB \| [0-9.]+ MB \| x [0-9.]+ \| [0-9.]+ % \|$' "$work/readme")" = 4 ] &&
        grep -qE '^\| DDP \| .* \| x 1.00 \| ' "$work/readme"
}

pp_table() {
    BUILD=$BUILD sh dev/bench/readme_table.sh --table pp --rounds 1 --steps 3 "${small_model[@]}" --layers 4 > "$work/readme" || return 1
    cat "$work/readme"
    [ "$(grep -cE '^\| (pipeline, 1 micro-batch|[48] micro-batches(, `--schedule [-a-z0-9]*`)?) \| [0-9]+ MB \| [0-9.]+ MB \| x [0-9.]+ \| [0-9.]+ % \|$' "$work/readme")" = 6 ] &&
        grep -qE '^\| DDP \| .* \| x 1.00 \| ' "$work/readme"
}

# Chapter 8's, of two meshes. With two ranks along an axis a rank sends as much as it has of gradients, or of the root.
mesh_table() {
    BUILD=$BUILD sh dev/bench/mesh_table.sh --meshes "2x1x1z 1x2x2" --rounds 1 --steps 2 --layers 4 --channels 64 --seq-len 16 > "$work/meshes" || return 1
    cat "$work/meshes"
    [ "$(grep -cE '^\| (2 x 1 x 1, ZeRO|1 x 2 x 2) (\| [0-9.]+ MB ){6}\|$' "$work/meshes")" = 2 ] &&
        grep -qE '^\| 2 x 1 x 1, ZeRO \| 1 \| \| \| 0.9 MB \| [0-9]+ ms \| [0-9]+ % \| [0-9]+ % \| \|$' "$work/meshes" &&
        grep -qE '^\| 1 x 2 x 2 \| 8 \| 0.6 MB \| 0.1 MB \| \| [0-9]+ ms \| [0-9]+ % \| [0-9]+ % \| 88.[0-9] %, [0-9.]+ % \|$' "$work/meshes"
}
# The table of all stages: tensor, pipeline and mixed parallelism keep what their shapes say, sharded data parallelism half.
all_stages() {
    BUILD=$BUILD sh dev/bench/zero_memory.sh --ranks 2 --stages "ddp zero-1 fsdp tp pp 3d" --layers 4 --channels 64 --heads 4 --seq-len 16 --batch-size 2 \
        --svg "$work/stages.svg" > "$work/table" || return 1
    cat "$work/table"
    grep -qE '^ +2 zero 1 .* 75.0 %  75.0 % ' "$work/table" && grep -qE '^ +2 3d .* 75.0 %  75.0 % ' "$work/table" &&
        grep -qE '^ +2 fsdp .* 50.[0-9] %  50.0 % ' "$work/table" && [ "$(grep -cE '^ +2 (tp|pp) .* [5-9][0-9.]+ %  50.0 % .* -$' "$work/table")" = 2 ] &&
        [ "$(grep -o 'fill="#[0-9a-f]*"' "$work/stages.svg" | grep -vc cccccc)" = 35 ] # a legend of five, and five parts of each of six bars
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
plot() { rm -rf "$work/seen"; mkdir "$work/seen"; PATH="$work/bin:$PATH" sh dev/bench/plot.sh "$@" | tee "$work/plot.out"; }
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
if [ -x "$BUILD/train_gpt2_zero" ] && [ -e data/train.bin ]; then
    check "the demo trains on 4 ranks, samples, saves a checkpoint, says where it is, and what each stage keeps" demo
    check "the command that it gives to train on works" its_command_goes_on
    check "what each stage keeps and sends is as the formulas say, also with accumulation" real_table
    check "a script says how it starts ranks" says_how
    check "a launcher that is not there is named" no_launcher
    check "an mpirun that refuses root is quoted, and what helps" refuses_root
    check "an mpirun that refuses so many ranks is quoted, and what helps" refuses_ranks
    check "one that fails in another way is quoted after our own words" refuses_anything
    check "README's table has a row for each stage" small_table
    for_tier rest
    check "  and chapter 5's for each way of tensor parallelism" tp_table
    check "  and chapter 6's for each schedule" pp_table
    check "  and chapter 8's for each mesh" mesh_table
    for_tier quick
    check "  a mesh that is none is named" fails_with "--meshes wants meshes such as .* not '2x2'" -- sh dev/bench/mesh_table.sh --meshes 2x2
    check "  and --steps 1 is an error, because the first step is not counted" fails_with "at least 2" -- sh dev/bench/readme_table.sh --steps 1
    for_tier rest
    check "any stages can be put beside DDP" all_stages
    for_tier quick
    check "  but not without it" fails_with "--stages begins with ddp" -- sh dev/bench/zero_memory.sh --stages "tp pp"
else
    skip "the demo trains" "make train_gpt2_zero was not run"
fi
check "the table and the picture have what the runs recorded" the_table
check "a run that is not as predicted ends the table" not_as_predicted
if command -v gnuplot > /dev/null; then
    check "a run's losses are plotted as they are, without nulls, torn lines and the options" one_run
    check "several runs are plotted together, each by its folder's name" two_runs
    check "a file that is not there is named" fails_with "no_such.jsonl cannot be read" -- sh dev/bench/plot.sh "$work/no_such.jsonl"
    check "a file without losses is named" fails_with "README.md has no losses" -- sh dev/bench/plot.sh README.md
    check "a picture that cannot be written is an error" fails_with "/no/such/folder/a.png was not made" -- sh dev/bench/plot.sh "$work/first/metrics.jsonl" /no/such/folder/a.png
    check "a picture without a run is an error" fails_with "no metrics.jsonl was given" -- sh dev/bench/plot.sh "$work/a.png"
else
    skip "losses are plotted" "there is no gnuplot"
fi
done_testing
