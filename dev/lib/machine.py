"""The machine in words, and how busy it is."""
import itertools, os, re, subprocess, time
from pathlib import Path
from dev.lib.script import ROOT, ask


def cores():
    return os.cpu_count()


def share_of_others(begin, end):
    """The percentage of the cores that other programs used between two times that Others.now() has told (busy seconds of all cores,
    seconds of all cores, seconds that this script and its programs used)."""
    busy, all_cores, own = (after - before for before, after in zip(begin, end))
    return max(0, round(100 * (busy - own) / all_cores)) if all_cores > 0 else 0


class Others:
    """What other programs use of the cores from now on. What this script has started counts when it has ended."""

    def __init__(self): self.begin = self.now()

    @staticmethod
    def now():
        try: ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError: return 0, 0, 0
        hertz = os.sysconf("SC_CLK_TCK")
        return (sum(ticks) - ticks[3] - ticks[4]) / hertz, sum(ticks) / hertz, sum(os.times()[:4])

    def percent(self): return share_of_others(self.begin, self.now())


def busy_percent():
    """The percentage of the processor that was busy during a second in which this script only waited."""
    others = Others()
    time.sleep(1)
    return others.percent()


def machine_in_words(device="cpu"):
    info, memory = Path("/proc/cpuinfo").read_text(), Path("/proc/meminfo").read_text()
    name = re.search(r"^model name[^:]*: *(.*)", info, re.M)
    name = re.sub(" +", " ", re.sub(r"\(R\)|\(TM\)| CPU.*", "", name[1])) if name else "unknown"
    gpus = ask("nvidia-smi --query-gpu=name --format=csv,noheader") if device != "cpu" else None
    return (f"{cores()} cores ({name}{', AVX-512' * bool(re.search(r'avx512f', info))}), "
            f"{int(re.search(r'MemTotal: *([0-9]+)', memory)[1]) * 1024 / 1e9:.0f} GB of memory"
            + "".join(f", {len([*group])} {gpu} GPU" for gpu, group in itertools.groupby(sorted((gpus or "").splitlines()))))


def commit():
    return (ask("git rev-parse --short HEAD", cwd=ROOT, stderr=subprocess.DEVNULL) or "unknown").strip()
