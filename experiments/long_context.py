"""What does a long context learn that a short one cannot? A task of dev/data/repeat.py, in which an answer is 512 tokens back or
more: context parallelism on four ranks, which see 2048 tokens together, and one rank that sees 512. Losses only."""
import math
import dev.lib as m

ROUNDS, NEEDS, BYTES_ONLY, BYTES_ONLY_RUNS = 1, ["single", "cp"], True, True
TITLE = "What does a long context learn that a short one cannot?"
QUESTION = """A document of [repeat.py](../../dev/data/repeat.py) pairs keys with values, falls silent, and then repeats itself.
Only the repeated values count in the loss, and each of them was last seen more than 512 tokens earlier. Four ranks share
sequences of 2048 tokens, 512 on each (`--cp ring --cp-balance zigzag`). The same model on one rank sees 512 tokens of the same
file, with as many tokens per step. Do the four ranks see one context?"""
PREDICTION = """A model that sees 512 tokens can only learn the 8 values that a key may take, so its loss cannot fall below ln 8
= 2.08. A model that sees the whole sequence can look up each answer, and its loss should approach 0."""
NOTES = """Each of the four ranks has 512 tokens of a sequence, as many as the single rank, so the answers came from other
ranks. No document comes twice, so no model can remember them. [Chapter 9](../../doc/09_cp.md#which-rank-has-which-tokens) says
which tokens a rank has."""
WORDS = {"long": "four ranks share 2048 tokens", "short": "one rank sees 512 tokens"}
RUNS, COLUMNS = "", {"tokens seen": lambda d, run: d.option(run, "--seq-len"),
                     "loss at step 1": lambda d, run: f"{d.value(run, 'first_loss'):.3f}",
                     "at the last step": lambda d, run: f"{d.value(run, 'loss'):.3f}"}
GUESS = math.log(8)


def measure(x):
    after, T, B, steps = (512, 1024, 1, 2) if x.quick else (1024, 2048, 8, 150)
    file = m.Path("build/experiments/repeat.bin")
    file.parent.mkdir(parents=True, exist_ok=True)
    m.output("python3 dev/data/repeat.py", [file], f"{after} {T} {B * steps + 1}")
    model = (f"--data {file} --tokenizer= --vocab-size 73 --layers 1 --channels {32 if x.quick else 64} --heads 2 --steps {steps} "
             "--lr 1e-2 --warmup-steps 20")
    x.run("long", 4, "cp", model, f"--seq-len {T} --batch-size {B} --cp ring --cp-balance zigzag")
    x.run("short", 1, "single", model, f"--seq-len {T // 4} --batch-size {4 * B}")


def short(d):
    return (f"After {d.value('long', 'steps')} steps the loss is {d.value('long', 'loss'):.2f} on four ranks that share "
            f"{d.option('long', '--seq-len')} tokens, and {d.value('short', 'loss'):.2f} on one rank that sees "
            f"{d.option('short', '--seq-len')}. Guessing gives {GUESS:.2f}.")


def answer(d): yield short(d)


def plot(d):
    return {"title": f"loss after {d.value('long', 'steps')} steps", "mark": (GUESS, "guessing"),
            "rows": [(WORDS[run], d.value(run, "loss"), f"{d.value(run, 'loss'):.3f}") for run in d.runs()]}
