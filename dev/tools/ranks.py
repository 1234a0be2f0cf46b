#!/usr/bin/env python3
"""ranks - says where ranks parted, from the files of last operations that they wrote when their run failed.

    build/ranks OUT/ops_rank_*.txt

Operations are compared sequence by sequence: the collectives of a communicator, and what one rank sends another. In each, the k-th
operation of one rank belongs to the k-th of the others; the first k at which they do not match is where to look. A file holds only
a rank's last 64 operations, but also how many operations each sequence had in all (llmc/watch/flight_recorder.h).

Status 0: the files show no difference; 2: the ranks parted; 1: a file cannot be read.
"""
import re, sys
from itertools import groupby
from typing import NamedTuple
from tool import die, read_bytes

MAGIC, LENGTH, MOST_RANKS = "shard.c operations 1", 64, 65536
WHOLE, REAL = r"(-?\d+)", r"-?[\d.]+"
OWNER = re.compile(rf"run (\S{{1,64}}) rank {WHOLE} of {WHOLE} step -?\d+ operations -?\d+")
CHANNEL = re.compile(rf"channel (\S{{1,23}}) (?:(collective) (-)|(send|receive) (\d{{1,9}})) {WHOLE} {WHOLE}")
OPERATION = re.compile(rf"op {WHOLE} (\S{{1,23}}) (\S{{1,15}}) (\d+) (\S{{1,7}}) (-|\d{{1,9}}) {WHOLE} (issued|started|finished) "
                       rf"{REAL} {REAL} {REAL}")


class Operation(NamedTuple):
    number: int          # on its channel
    communicator: str
    collective: str      # or "send", "receive": these are between two ranks
    elements: int
    type: str
    peer: int            # the root, the receiver or the sender; -1: there is none
    step: int
    state: str

    is_message = property(lambda self: self.collective in ("send", "receive"))

    def what(self):
        """Equal if both describe the same operation. A send and its receive differ in name and peer, and an all-to-all-v in what
        each rank sends."""
        elements = None if self.collective == "all-to-all-v" else self.elements
        return elements, self.step, self.type, *(() if self.is_message else (self.peer, self.collective))

    def __str__(self):
        """ "broadcast #0 of world (64 bf16, root 0, step 1)", "send #3 to rank 2 of pp.0 (64 bf16, step 1)" """
        to = f" {'to' if self.collective == 'send' else 'from'} rank {self.peer}" if self.is_message else ""
        what = f"{self.elements} {self.type}, " if self.elements else ""
        root = f"root {self.peer}, " if not self.is_message and self.peer >= 0 else ""
        return f"{self.collective} #{self.number}{to} of {self.communicator} ({what}{root}step {self.step})"


class Channel(dict):
    """A rank's part of a sequence: the last of its operations, by number. issued: how many in all."""

    def __init__(self, rank, issued=0): self.rank, self.issued = rank, issued


# ---- reading ----
class File:
    """A rank's last operations; dies with the file's name and the line if they are damaged."""

    def __init__(self, path):
        lines = read_bytes(path, "give the files of last operations that ranks left in their --out").decode("latin-1").split("\n")
        self.path, self.line, self.channels = path, len(lines), {}
        self.require(lines[-2:] == ["end", ""], "it does not end with a line 'end'")
        self.require(lines[0] == MAGIC, f"its first line is not '{MAGIC}'", 1)
        self.run, rank, size = self.match(OWNER, lines[1], "its run, rank and number of ranks", 2)
        self.rank, self.size = int(rank), int(size)
        self.require(0 <= self.rank < self.size <= MOST_RANKS, f"rank {rank} of {size} is impossible")
        for self.line, line in enumerate(lines[2:-2], 3):
            self.read_channel(line) if line.startswith("channel ") else self.read_operation(line)
        for (communicator, _, _), c in self.channels.items():
            self.require(not c or c.issued - 1 in c, f"the last operations of {communicator} are not there")

    def require(self, condition, message, line=None):
        self.line = line or self.line
        if not condition: die(f"{self.path}:{self.line}: this is not a file of last operations, or it is damaged: {message}")

    def match(self, pattern, text, what, line=None):
        found = pattern.fullmatch(text)
        self.require(found, f"{what} was expected, not '{text}'", line)
        return found.groups()

    def peer(self, text):
        """A rank; -1 for "-"."""
        self.require(text == "-" or int(text) < self.size, f"there is no rank {text}")
        return -1 if text == "-" else int(text)

    def read_channel(self, line):
        communicator, way, peer, issued, finished = filter(None, self.match(CHANNEL, line, "a channel"))
        key = communicator, way, self.peer(peer)
        self.require(0 <= int(finished) <= int(issued), f"{issued} issued and {finished} finished is impossible")
        self.require(key not in self.channels, "this channel is there twice")
        self.channels[key] = Channel(self.rank, int(issued))

    def read_operation(self, line):
        number, communicator, collective, elements, type, peer, step, state = self.match(OPERATION, line, "an operation")
        o = Operation(int(number), communicator, collective, int(elements), type, self.peer(peer), int(step), state)
        self.require(sum(map(len, self.channels.values())) < LENGTH, f"there are more than {LENGTH} operations")
        way = (collective, o.peer) if o.is_message else ("collective", -1)
        channel = self.channels.get((communicator, *way), Channel(self.rank))
        self.require(0 <= o.number < channel.issued, f"its channel does not have operation {number}")
        last = max(channel, default=o.number - 1)
        self.require(o.number == last + 1, f"{number} follows {last}")
        channel[o.number] = o


# ---- comparing ----
def ranks_text(ranks):
    """ "rank 2", "ranks 0-2, 5 and 7" """
    ranks = sorted(set(ranks))
    spans = [[r for _, r in span] for _, span in groupby(enumerate(ranks), lambda x: x[1] - x[0])]  # without gaps
    *words, last = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}{' and ' * bool(words)}{last}"


def text_of_different(members, k, is_oldest):
    """Which ranks issued what as operation k, the largest party first."""
    parties = {}
    for m in members:
        if k in m: parties.setdefault(m[k].what(), []).append(m)
    said = ", ".join(f"{ranks_text(m.rank for m in party)} issued {party[0][k]}"
                     for party in sorted(parties.values(), key=len, reverse=True))
    return said + "; older operations are not in the files, so the ranks may have parted earlier" * (is_oldest and k > 0)


def text_of_missing(members, k):
    """Which members did not issue operation k, and what each of them issued last."""
    what = next((m[k] for m in members if k in m), f"operation #{k} (no file says any more what it was)")
    behind, ahead = [m for m in members if m.issued <= k], [m for m in members if m.issued > k]
    said = (f"{ranks_text(m.rank for m in behind)} never issued {what}; {ranks_text(m.rank for m in ahead)} did, and came as far "
            f"as #{max(m.issued for m in members) - 1}")
    for m in behind:
        last = m.get(k - 1)
        said += f"; rank {m.rank}'s last: " + (f"{last}, {last.state}" if last else "none" if k == 0 else "no longer in its file")
    return said


def text_of_unfinished(members, k):
    """Where operation k, which all issued, did not finish; None: it did everywhere."""
    known = [m for m in members if k in m]
    unfinished = [m for m in known if m[k].state != "finished"]
    if not unfinished: return None
    everywhere = ", that is, nowhere" if len(unfinished) == len(known) else ""
    return f"everyone issued {unfinished[-1][k]}, but on {ranks_text(m.rank for m in unfinished)} it did not finish{everywhere}"


def compare(members):
    """True if the members of a sequence did not part, and what the files show, in words."""
    issued = [m.issued for m in members]
    begin = min([min(m) for m in members if m] + [min(issued)])
    compared = next((k for k in range(begin, max(issued)) if sum(k in m for m in members) > 1), None) # in two files
    for k in range(begin, max(issued)):
        if len({m[k].what() for m in members if k in m}) > 1: return False, text_of_different(members, k, k == compared)
        if min(issued) <= k: return False, text_of_missing(members, k)
    for k in range(begin, max(issued)):
        if said := text_of_unfinished(members, k): return False, said
    if max(issued) == 0: return True, "the same on all: 0 operations"
    if compared is None:
        return False, f"all issued {max(issued)} operations, but no two files hold the same one any more: they cannot be compared"
    return True, f"the same on all: {max(issued)} operations, of which #{compared} to #{max(issued) - 1} could be compared"


def check_files(files):
    """Dies unless the files are of one run and each of another rank; says which ranks have none."""
    absent = set(range(files[0].size))
    for f in files:
        if (f.size, f.run) != (files[0].size, files[0].run): die(f"{files[0].path} and {f.path} are of different runs; give the "
                                                                 "files of one")
        if f.rank not in absent: die(f"{f.path} is of rank {f.rank}, of which there is another file already")
        absent.remove(f.rank)
    if absent: print(f"no file of {ranks_text(absent)} of {files[0].size}: killed before it could be written, or not given")


def sequences_of(files):
    """Of each sequence in the files its name and the channels of its members; one that issued nothing has an empty one."""
    found = {}
    for f in files:
        for (communicator, way, peer), channel in f.channels.items():
            ends = {"collective": (), "send": (f.rank, peer), "receive": (peer, f.rank)}[way]
            found.setdefault((communicator, ends), {})[f.rank] = channel
    for (communicator, ends), channels in found.items():
        name = f"{communicator}, rank {ends[0]} to rank {ends[1]}" if ends else communicator
        members = [f.rank for f in files if f.rank in channels or f.rank in ends]
        yield name, [channels.get(rank, Channel(rank)) for rank in members]


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(f"usage: {sys.argv[0]} OUT/ops_rank_*.txt\nSays at which operation the ranks of a failed run parted.")
        sys.exit(sys.argv[1:] not in (["--help"], ["-h"]))
    files = [File(path) for path in sys.argv[1:]]
    check_files(files)
    together = True
    for name, members in sequences_of(files):
        if len(members) < 2: continue  # nothing to compare
        same, said = compare(members)
        print(f"{name}: {said}")
        together &= same
    sys.exit(0 if together else 2)


if __name__ == "__main__": main()
