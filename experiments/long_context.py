"""What does a long context learn that a short one cannot? A task of dev/data/repeat.py, in which an answer is 512 tokens back or
more: context parallelism on four ranks, which see 2048 tokens together, and one rank that sees 512. Losses only."""
import math
import dev.lib as m

ROUNDS, NEEDS, BYTES_ONLY, BYTES_ONLY_RUNS = 1, ["single", "cp"], True, True
TITLE = "What does a long context learn that a short one cannot?"
QUESTION = """A document of [repeat.py](../../dev/data/repeat.py) has keys with values of its own, then silence, then the same again, and
what counts in the loss is each value when its key comes again. It stands more than 512 tokens before. Four ranks share sequences of 2048
tokens, so that each has 512 of them (`--cp ring --cp-balance zigzag`): do they see the whole together? The same model on one rank sees
512 tokens, as many in a step, of the same file."""
NOTES = """A model that does not see the pairs can only learn which 8 values a key has, and reaches ln 8 at best. No document comes
twice, so the loss of a step is that of documents never seen. [Chapter 9](../../doc/09_cp.md#which-rank-has-which-tokens) says
which tokens a rank has."""
WORDS = {"long": "four ranks share 2048 tokens", "short": "one rank sees 512 tokens"}
RUNS, COLUMNS = "", {"tokens seen": lambda d, run: d.option(run, "--seq-len"),
                     "loss of step 1": lambda d, run: f"{d.value(run, 'first_loss'):.3f}",
                     "of the last step": lambda d, run: f"{d.value(run, 'loss'):.3f}"}
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
            f"{d.option('long', '--seq-len')} tokens, and {d.value('short', 'loss'):.2f} where {d.option('short', '--seq-len')} "
            f"are seen; guessing has {GUESS:.2f}.")


def answer(d):
    yield short(d)
    yield (f"Each of the four has {int(d.option('long', '--seq-len')) // 4} tokens of a sequence, as the one rank has: what it "
           "needs to know has come from other ranks.")


def plot(d):
    return {"title": f"loss after {d.value('long', 'steps')} steps", "mark": (GUESS, "guessing"),
            "rows": [(WORDS[run], d.value(run, "loss"), f"{d.value(run, 'loss'):.3f}") for run in d.runs()]}
