"""Results: a file with a header line, and a line for each run and round; medians and ratios of them, and tables in Markdown."""
import json, os, re, shlex, sys, time
from pathlib import Path
from statistics import median
from dev.lib.machine import busy_percent, commit, cores, machine_in_words
from dev.lib.script import fail, option


class Results:
    def __init__(self, header, file=""):
        self.header, self.file, self.rounds, self.ratios = header, file, {}, {}

    @classmethod
    def read(cls, file):
        results = cls(None, file)
        try: text = Path(file).read_text()
        except OSError as error: fail(f"{file}: {error.strerror}")
        for number, line in enumerate(text.splitlines(), 1):
            try: record = json.loads(line)
            except ValueError: fail(f"{file}:{number}: this line is no JSON object; a new run makes the file anew")
            if record.get("record") == "header": results.header = record
            elif "run" not in record: fail(f"{file}:{number}: this line names no run")
            elif record["round"] in results.rounds.get(record["run"], {}):
                fail(f"{file}:{number}: round {record['round']} of {record['run']} is there twice")
            else: results.add(**record)
        if not results.header: fail(f'{file}: there is no line with "record":"header", so date and machine are unknown')
        return results

    def add(self, run, round=1, **fields):
        self.rounds.setdefault(run, {})[round] = {"run": run, "round": round} | fields

    def write(self, file):
        """All of it or nothing: an interrupted script leaves the file as it was."""
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        lines = [self.header, *(record for rounds in self.rounds.values() for record in rounds.values())]
        new = Path(f"{file}.new")
        new.write_text("".join(json.dumps(line, separators=(",", ":"), sort_keys=True) + "\n" for line in lines))
        new.replace(file)

    def runs(self, pattern=""):
        return [run for run in self.rounds if re.search(pattern, run)]

    def each_round(self, run):
        if run not in self.rounds: fail(f"{self.file}: there is no run '{run}'; a new run makes the file anew")
        return [self.rounds[run][number] for number in sorted(self.rounds[run])]

    def first(self, run):
        return self.each_round(run)[0]

    def records(self):
        """Of each run the first round."""
        return [self.first(run) for run in self.rounds]

    def field(self, record, key):
        """A number of a record, of a list the median; key may be "shares/computing"."""
        value = record
        for part in key.split("/"): value = value.get(part) if isinstance(value, dict) else None
        if value is None: fail(f"{self.file}: run '{record['run']}' has no {key}")
        return median(value) if isinstance(value, list) else value

    def value(self, run, key):
        """The median over the rounds."""
        return median(self.field(record, key) for record in self.each_round(run))

    def all(self, run, key):
        """The values of all steps of all rounds."""
        return [x for record in self.each_round(run) for x in record[key]]

    def of_steps(self, run, key):
        """Their median."""
        return median(self.all(run, key))

    def option(self, run, name):
        """What a run's options gave one, or ""."""
        return option(self.first(run)["options"].split(), name, "")

    def ratio(self, run, base, key):
        """The ratio to another run in each round: the median, the least and the most."""
        bases = {record["round"]: record for record in self.each_round(base)}
        ratios = [self.field(record, key) / self.field(bases[record["round"]], key) for record in self.each_round(run)
                  if record["round"] in bases]
        if not ratios: fail(f"{self.file}: '{run}' and '{base}' have no round in common")
        self.refuse_contradiction(run, base, key, median(ratios))
        return median(ratios), min(ratios), max(ratios)

    def refuse_contradiction(self, run, base, key, ratio):
        """Ends the script if a ratio, another one to the same base, and the one between both runs cannot all be true. The
        median of rounds in which other programs took the cores may be such a ratio."""
        known = self.ratios.setdefault((base, key), {})
        for other, other_ratio in known.items():
            both = [self.field(a, key) / self.field(b, key) for a in self.each_round(run) for b in self.each_round(other)
                    if a["round"] == b["round"]]
            if both and contradict(ratio, other_ratio, median(both)):
                fail(f"{self.file or 'these runs'}: by {key}, '{run}' is {ratio:.2f} and '{other}' {other_ratio:.2f} times "
                     f"'{base}', "
                     f"but '{run}' is {median(both):.2f} times '{other}'. These ratios contradict each other; measure again when "
                     "nothing else runs")
        known[run] = ratio

    def print_table(self, *rows): print(table(*rows), end="")

    def busy(self, what):
        """What must be said of figures if other programs ran, or ""."""
        used = max(self.header.get("busy_percent", 0), self.header.get("others_percent", 0)) # before the first run, and meanwhile
        return f"Other programs used {used} % of this machine: do not trust {what}." if used > 5 else ""

    speed = property(lambda self: self.header["speed"] == "yes", doc="whether speeds were measured")

    def share(self, run, base, key):
        return self.value(run, key) / self.value(base, key)

    def refused(self, run):
        """Why a run was out of memory, if it was."""
        return self.first(run).get("refused")

    def exposed(self, run):
        """The share of a step in which nothing is computed for want of communication."""
        return self.value(run, "comm_exposed_ms") / self.value(run, "step_ms")

    def size(self, run, key="memory"):
        return size(self.value(run, key))

    def tokens(self, run):
        """Tokens per second of all its ranks together."""
        return f"{self.value(run, 'tokens_per_s'):,.0f}"

    def beside(self, run, base, key="step_ms"):
        return times(self.ratio(run, base, key))

    def longer(self, run, base, what="A step"):
        """A sentence about the time of a step beside another run's, or none where speeds were not measured."""
        if not self.speed: return ""
        ratio = self.ratio(run, base, "step_ms")
        return f" {what} takes {times(ratio)} times as long.{no_difference(ratio)}"


def contradict(a_over_c, b_over_c, a_over_b, most=1.25):
    """Whether three ratios of which two give the third are apart by more than noise."""
    off = a_over_b * b_over_c / a_over_c
    return max(off, 1 / off) > most


def header(device="cpu"):
    return {"record": "header", "table": Path(sys.argv[0]).stem, "arguments": shlex.join(sys.argv[1:]), "commit": commit(),
            "environ": {name: os.environ[name] for name in ("PROGRAM", "BUILD") if name in os.environ},
            "date": time.strftime("%F"), "machine": machine_in_words(device), "cores": cores(), "busy_percent": busy_percent()}


def table(*rows, blank=""):
    """Markdown; the first row is the header. blank: what stands between bars and words, and in an empty cell."""
    lines = [[*map(str, row)] for row in (rows[0], [f"{blank}---{blank}"] * len(rows[0]), *rows[1:])]
    lines = [[cell if cell.strip().startswith("---") else f" {cell} " if cell else f" {blank}" for cell in line] for line in lines]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def padded(vocabulary):
    """The rows of an embedding."""
    return (vocabulary + 127) // 128 * 128


def picture(file, svg):
    """Writes what --svg wants, if it is given."""
    if not file: return
    Path(file).write_text(svg())
    print(f"\npicture: {file}")


# ---- numbers in words ----
UNITS = {"bytes": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def size(b):
    unit, by = next((unit, by) for unit, by in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1)) if b >= by or by == 1)
    x = b / by
    return f"{int(x)} bytes" if by == 1 else f"{x:.0f} {unit}" if x >= 100 else f"{x:.1f} {unit}" if x >= 10 else f"{x:.2f} {unit}"


def count(n): return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million" if n >= 1e6 else f"{n / 1e3:.0f} thousand"
def percent(share): return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def times(ratio):
    """A ratio, and from where to where it goes over the rounds."""
    median, least, most = ratio
    return f"{median:.2f}" + (f" ({least:.2f} to {most:.2f})" if least != most else "")


def no_difference(*ratios):
    """What must be said where rounds differ by more than what is compared."""
    if not all(least < 1 < most for _, least, most in ratios): return ""
    return f" {'Both ranges include' if len(ratios) > 1 else 'The range includes'} 1, so these rounds show no difference."
