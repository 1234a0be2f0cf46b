#!/bin/sh
# demo.sh - trains a small GPT-2 from scratch with Muon, on 4 ranks that each keep a quarter of its state (ZeRO stage 3), lets it
# write, plots its loss, and measures what a rank keeps with DDP and each stage of ZeRO. Takes about a minute on two cores.
#
#   make demo                             DEMO='--steps 100' adds options of train_gpt2_muon
#
# The text is this course's own code, cut into 2048 tokens that build/train_bpe learned from it: a minute of bytes teaches less.
# BUILD   folder of the programs (default build)    MPIRUN  how to start ranks (dev/on_ranks.sh)
# DATA    folder of the tokens and the vocabulary (default data/bpe)
# MINUTES that training may take, a whole number (default 10). A machine that needs longer for 400 steps trains fewer, at least 10.
set -eu
cd "$(dirname -- "$0")/.."
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
export BUILD="${BUILD:-build}"
program=$BUILD/train_gpt2_muon out=$BUILD/demo data=${DATA:-data/bpe}
for file in "$program" "$data/train.bin"; do [ -e "$file" ] || fail "there is no $file; make demo makes it first"; done
case ${MINUTES:-10} in *[!0-9]*) fail "MINUTES must be a whole number, not '$MINUTES'" ;; esac
ranks_can_start 4
# Later options overrule these.
set -- --layers 4 --heads 4 --channels 128 --seq-len 64 --batch-size 8 --lr 1.6e-2 \
    --data "$data/train.bin" --val-data "$data/val.bin" --tokenizer "$data" --log-every 20 --eval-every 100 --eval-steps 16 \
    --sample-every 1000000 --sample-tokens 200 --temperature 0.7 --prompt 'static void gpt2_' "$@"

case " $* " in
    *" --help "* | *" -h "*) exec "$program" --help ;;
    *" --out"* | *" -o"*) fail "the demo writes to $out; leave out --out" ;;
esac

train() { on_ranks 4 "$program" --zero-stage 3 --out "$out" "$@"; }
rm -rf "$out"
steps=
case " $* " in *" --steps"*) ;; *)
    # If these two steps fail, so does the demo below, and says why.
    echo "timing two steps"
    train "$@" --steps 2 --val-data= --sample-every 0 >"$BUILD/demo.log" 2>&1 || true
    ms=$(sed -n 's/.*"step_ms":\([0-9]*\).*/\1/p' "$out/metrics.jsonl" 2>/dev/null | tail -n 1)
    rm -rf "$out" "$BUILD/demo.log"
    ms=$((${ms:-0} + 1)) steps=$((${MINUTES:-10} * 60000 / ms))
    if [ "$steps" -ge 400 ]; then steps=400
    else
        [ "$steps" -ge 10 ] || steps=10
        echo "a step takes $((ms / 1000)).$((ms / 100 % 10)) s here, so the demo trains $steps steps, not 400; DEMO='--steps 400' trains them all"
    fi
    ;;
esac
train "$@" ${steps:+--steps "$steps"}

echo
if command -v python3 >/dev/null; then
    python3 -m dev.plot "$out/metrics.jsonl" || echo "(no plot: see above; everything else is there)"
    printf '\nWhat a rank of 4 keeps of this model, and sends:\n'
    python3 -m experiments zero_memory --ranks 4 "$@"
else echo "(no plot, and no table of what each stage of ZeRO keeps: python3 is missing; sh dev/setup.sh installs it)"; fi
checkpoint=$(find "$out" -name 'step_*' -type d | sort | tail -n 1)
step=${checkpoint##*_} step=${step#"${step%%[!0]*}"}
losses=$(sed -n 's/.*"val_loss_per_byte" *: *\([0-9.]*\).*/\1/p' "$out/metrics.jsonl" | sed -n '1p;$p')
case $losses in *"
"*) # shellcheck disable=SC2086 # two numbers
    printf '\nvalidation loss: %.2f nats per byte at first, %.2f at the end\n' $losses ;;
esac
# The options as one would type them.
options=$(for word in "$@" --steps $((2 * ${step:-0})); do
    case $word in
        *[!A-Za-z0-9_./=-]*|'') printf '%s\n' "$word" | sed "s/'/'\\\\''/g; s/.*/ '&'/" | tr -d '\n' ;;
        *) printf ' %s' "$word" ;;
    esac
done)
cat <<END
metrics: $out/metrics.jsonl, a line a step
checkpoint: $checkpoint

Try next:
    diff -p train_gpt2_ddp.cu train_gpt2_zero.cu   what sharding adds to data parallelism; doc/03_zero.md explains it
    make train_gpt2_single                         the program that the course begins with, in doc/01_single.md
    the demo's training, twice as long:
    $launcher -np 4 $program --zero-stage 3 --out $out --resume$options
END
