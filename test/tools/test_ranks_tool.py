"""build/ranks: where ranks parted, from made-up files of last operations, and which files are none. (test/unit/test_rank_files.c
writes such files, and test/runs/test_faults.py has those of a run.)"""
import os
import pytest
from suite import assert_refused, command, program, succeeds

MAGIC = "shard.c operations 1"


class Log:
    """What a rank has issued; its file has the last 64 operations."""

    def __init__(self, rank):
        self.rank, self.step, self.operations, self.issued = rank, 0, [], {("world", "collective", "-"): 0}

    def issue(self, communicator, collective, elements, peer="-", state="finished", type="fp32"):
        key = (communicator, collective, peer) if collective in ("send", "receive") else (communicator, "collective", "-")
        number = self.issued.get(key, 0)
        self.issued[key] = number + 1
        self.operations.append(f"op {number} {communicator} {collective} {elements} {type} {peer} {self.step} {state} 1.000000 "
                               "2.000000 3.000000")

    def train(self, begin, end):
        """Four buckets a step, of 100, 200, 300 and 400 elements: operations begin to end - 1."""
        for i in range(begin, end):
            self.step = 1 + i // 4
            self.issue("world", "all-reduce", 100 * (1 + i % 4))
        return self

    def write(self, folder, ranks, run="a", name=None):
        path = folder / (name or f"ops_rank_{self.rank:04}.txt")
        channels = [f"channel {communicator} {way} {peer} {n} 0" for (communicator, way, peer), n in self.issued.items()]
        path.write_text("\n".join([MAGIC,
                                   f"run {run} rank {self.rank} of {ranks} step {self.step} operations {len(self.operations)}",
                                   *channels, *self.operations[-64:], "end\n"]))
        return path


def said(folder, logs, sequence="world"):
    """What build/ranks says of a sequence."""
    run = command([program("ranks")], [log.write(folder, len(logs)) for log in logs])
    lines = dict(line.split(": ", 1) for line in run.out.splitlines())
    assert run.status == (0 if all(text.startswith("the same on all") for text in lines.values()) else 2), run
    return lines[sequence]


# Ranks that train operations of the world: (first, last rank, from, to).
@pytest.mark.parametrize("ranks, trained, others, parts", [
    (4, [(0, 3, 0, 100)], 0, ["the same on all: 100 operations, of which #36 to #99 could be compared"]),
    (2, [], 0, ["the same on all: 0 operations"]),
    # One that stopped never issued the next.
    (4, [(0, 3, 0, 41), (0, 1, 41, 43), (3, 3, 41, 42)], 0, ["rank 2 never issued all-reduce #41 of world (200 fp32, step 11)",
     "ranks 0-1 and 3 did, and came as far as #42", "rank 2's last: all-reduce #40 of world (100 fp32, step 11), finished"]),
    (2, [(0, 0, 0, 2)], 0, ["rank 1 never issued all-reduce #0 of world", "rank 1's last: none"]),
    # The others have forgotten what one that is far behind should do next, and it may have forgotten what it did last.
    (3, [(0, 2, 0, 20), (0, 1, 20, 200)], 0, ["rank 2 never issued operation #20 (no file says any more what it was)",
     "ranks 0-1 did, and came as far as #199", "rank 2's last: all-reduce #19 of world (400 fp32, step 5), finished"]),
    (2, [(0, 1, 0, 20), (0, 0, 20, 200)], 70, ["rank 1 never issued operation #20 (no file says any more what it was)",
     "rank 0 did, and came as far as #199", "rank 1's last: no longer in its file"]),
    (2, [(0, 1, 0, 10)], 70, ["all issued 10 operations, but no two files hold the same one any more"]),
    # One that is left out is seen where the others differ.
    (4, [(0, 3, 0, 41), (0, 1, 41, 60), (3, 3, 41, 60), (2, 2, 42, 59)], 0,
     ["ranks 0-1 and 3 issued all-reduce #41 of world (200 fp32, step 11), rank 2 issued all-reduce #41 of world (300 fp32, step"]),
    (2, [(0, 1, 0, 5), (0, 0, 5, 200), (1, 1, 6, 201)], 0,
     ["issued all-reduce #136", "older operations are not in the files, so the ranks may have parted earlier"])],
    ids=["same", "none", "stopped", "first", "forgotten", "last_forgotten", "unknown", "left_out", "older"])
def test_where_ranks_parted_is_found_and_what_each_did_there(ranks, trained, others, parts, tmp_path):
    logs = [Log(r) for r in range(ranks)]
    for first, last, begin, end in trained:
        for log in logs[first:last + 1]: log.train(begin, end)
    for _ in range(others): logs[1].issue("pair", "all-reduce", 1)  # these push the world's out of rank 1's file
    text = said(tmp_path, logs)
    assert all(part in text for part in parts), text


def test_one_left_out_among_equals_shows_in_the_step(tmp_path):
    logs = [Log(r) for r in range(3)]
    for log in logs:
        for i in range(24):
            log.step = 1 + i // 8
            if log.rank != 1 or i != 10: log.issue("world", "all-reduce", 100)
    assert said(tmp_path, logs) == ("ranks 0 and 2 issued all-reduce #15 of world (100 fp32, step 2), rank 1 issued all-reduce #15 "
                                    "of world (100 fp32, step 3)")


USUAL = {"collective": "broadcast", "type": "fp32", "elements": 100, "peer": 1, "step": 5}


@pytest.mark.parametrize("changed", [{"collective": "all-gather"}, {"type": "bf16"}, {"elements": 101}, {"peer": 0}, {"step": 6},
                                     {}], ids=lambda changed: "".join(changed) or "state")
def test_every_property_of_an_operation_is_compared_and_that_it_finished(changed, tmp_path):
    logs = [Log(r).train(0, 5) for r in range(3)]
    for log in logs:
        o = USUAL | (changed if log.rank == 0 else {})
        log.step = o["step"]
        log.issue("world", o["collective"], o["elements"], o["peer"], "finished" if log.rank == 1 else "started", o["type"])
    text = said(tmp_path, logs)
    if changed: assert text.startswith("ranks 1-2 issued broadcast #5 of world (100 fp32, root 1, step 5), rank 0 issued")
    else: assert text == "everyone issued broadcast #5 of world (100 fp32, root 1, step 5), but on ranks 0 and 2 it did not finish"


def test_ranks_send_different_numbers_in_an_all_to_all_v(tmp_path):
    logs = [Log(r) for r in range(3)]
    for log in logs: log.issue("world", "all-to-all-v", 100 * log.rank)
    assert said(tmp_path, logs) == "the same on all: 1 operations, of which #0 to #0 could be compared"
    for log in logs: log.issue("world", "all-to-all" + "-v" * (log.rank > 0), 100)
    assert said(tmp_path, logs).startswith("ranks 1-2 issued all-to-all-v #1 of world (100 fp32, step 0), rank 0 issued all-to-all #1")


@pytest.mark.parametrize("received, text", [
    ([10, 20, 30, 40, 50], "the same on all: 5 operations, of which #0 to #4 could be compared"),
    ([], "rank 2 never issued send #0 to rank 2 of world (10 fp32, step 0)"),
    ([11], "rank 0 issued send #0 to rank 2 of world (10 fp32, step 0), rank 2 issued receive #0 from rank 0 of world (11 fp32, "
           "step 0)")],
    ids=["same", "missing", "other"])
def test_sends_are_held_against_receives(received, text, tmp_path):
    logs = [Log(r) for r in range(3)]
    for elements in range(10, 60, 10):
        logs[0].issue("world", "send", 7, 1)
        logs[1].issue("world", "receive", 7, 0)
        logs[0].issue("world", "send", elements, 2)
    for elements in received: logs[2].issue("world", "receive", elements, 0)
    assert said(tmp_path, logs, "world, rank 0 to rank 2").startswith(text)


def test_communicators_and_pairs_are_compared_each_by_itself_and_a_rank_without_a_file_is_told(tmp_path):
    logs = [Log(r) for r in range(4)]
    for log in logs:
        for _ in range(10):
            if log.rank >= 2: log.issue("world", "all-reduce", 50)  # in another order with the group's
            log.issue(f"shard.{log.rank % 2}", "all-gather", 10 + 1000 * (log.rank % 2))
        for _ in range(10 * (log.rank < 2)): log.issue("world", "all-reduce", 50)
    logs[3].issue("shard.1", "all-gather", 77)
    for way in "send", "receive":
        for rank in 0, 1: logs[rank].issue("world", way, 10, 1 - rank)
    run = command([program("ranks")], [logs[r].write(tmp_path, 4) for r in (0, 1, 3)])
    assert run.status == 2 and sorted(run.out.splitlines()) == sorted("""
no file of rank 2 of 4: killed before it could be written, or not given
world: the same on all: 10 operations, of which #0 to #9 could be compared
world, rank 0 to rank 1: the same on all: 1 operations, of which #0 to #0 could be compared
world, rank 1 to rank 0: the same on all: 1 operations, of which #0 to #0 could be compared
shard.1: rank 1 never issued all-gather #10 of shard.1 (77 fp32, step 0); rank 3 did, and came as far as #10; \
rank 1's last: all-gather #9 of shard.1 (1010 fp32, step 0), finished""".strip().splitlines()), run


# ---- files ----
HEAD, CHANNEL = f"{MAGIC}\nrun a rank 1 of 4 step 3 operations 2\n", "channel world collective - 2 1\n"
FIRST, SECOND = "op 0 world all-reduce 10 fp32 - 3 finished 1 2 3\n", "op 1 world all-reduce 10 fp32 - 3 started 1 2 0\n"
OPS, NO_FILE = FIRST + SECOND, "this is not a file of last operations, or it is damaged: "


@pytest.mark.parametrize("text, says", [
    ("", f":1: {NO_FILE}it does not end"), ("step,loss\nend\n", f":1: {NO_FILE}its first line"),
    (f"{MAGIC}\nrun a rank 4 of 4 step 3 operations 2\nend\n", ":2: "),
    (f"{MAGIC}\nrun a rank 1 of 99999999 step 3 operations 2\nend\n", ":2: "), (f"{MAGIC}\nrank 1\nend\n", ":2: "),
    (HEAD + CHANNEL + OPS, "it does not end"), (HEAD + CHANNEL + OPS + "end\nmore\n", "it does not end"),
    (HEAD + CHANNEL + "op 0 world all-reduce 10\nend\n", f":4: {NO_FILE}an operation was"),
    (HEAD + OPS + "end\n", f":3: {NO_FILE}its channel does not have operation 0"), (HEAD + 2 * CHANNEL + OPS + "end\n", "twice"),
    (HEAD + "channel world collective - 1 2\nend\n", "1 issued and 2 finished is impossible"),
    (HEAD + "channel world collective - -1 -2\nend\n", "is impossible"),
    (HEAD + "channel world gather - 2 1\n" + OPS + "end\n", "a channel was expected"),
    (HEAD + "channel world send - 2 1\nend\n", "a channel was expected"),
    (HEAD + "channel world send 4 2 1\nend\n", "there is no rank 4"),
    (HEAD + "channel world send x 2 1\nend\n", "a channel was expected"),
    (HEAD + CHANNEL + FIRST + "end\n", "the last operations of world are not there"),
    (HEAD + "channel world collective - 3 1\n" + FIRST + SECOND.replace("op 1", "op 2") + "end\n", "2 follows 0"),
    (HEAD + CHANNEL + FIRST.replace("op 0", "op 5") + "end\n", "does not have operation 5"),
    (HEAD + CHANNEL + SECOND.replace("started", "sleeping") + "end\n", "an operation was expected"),
    (HEAD + CHANNEL + SECOND.replace("-", "9", 2).replace("all9reduce", "all-reduce") + "end\n", "there is no rank 9"),
    (HEAD + CHANNEL + SECOND.replace("fp32", "a-type-with-a-long-name") + "end\n", "an operation was expected")])
def test_damaged_files_are_refused_with_the_line(text, says, tmp_path):
    (tmp_path / "damaged").write_text(text)
    run = command([program("ranks"), tmp_path / "damaged"])
    assert run.status == 1 and f"error: {tmp_path}/damaged:" in run.err and says in run.err, run


@pytest.mark.parametrize("text", [HEAD + CHANNEL + "end\n", HEAD + CHANNEL + OPS + "end\n"], ids=["left_the_ring", "whole"])
def test_whole_files_are_read(text, tmp_path):
    (tmp_path / "whole").write_text(text)
    succeeds([program("ranks"), tmp_path / "whole"])


def test_what_is_no_file_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    assert_refused(command([program("ranks"), pipe]), "cannot be opened: No such file")
    os.mkfifo(pipe)
    assert_refused(command([program("ranks"), pipe], timeout=60), "is a pipe, not a file")


READ_ALL = """
import pathlib, sys
import ranks
whole, path = sys.argv[1].encode(), pathlib.Path(sys.argv[2])
changed = [whole[:at] + bytes([whole[at] ^ (1 + (at * 2654435761 >> 7) % 127)]) + whole[at + 1:] for at in range(len(whole))]
for text in [whole[:at] for at in range(len(whole))] + changed:
    path.write_bytes(text)
    try:
        ranks.File(path)
        print(len(text) - len(whole))
    except SystemExit as e: assert e.code == 1
"""


def test_a_file_damaged_anywhere_is_read_or_refused(tmp_path):
    whole = HEAD + CHANNEL + "channel world send 2 1 1\n" + OPS + "op 0 world send 9 bf16 2 3 finished 1 2 3\nend\n"
    run = succeeds(["python3", "-c", READ_ALL, whole, tmp_path / "damaged"], env={"PYTHONPATH": "dev/tools"})
    assert set(run.out.split()) == {"0"} and run.err.count("error: ") > len(whole), run  # what is cut off is never read


def test_files_of_different_runs_or_of_one_rank_are_not_mixed(tmp_path):
    first = Log(0).write(tmp_path, 2)
    for run, ranks in ("b", 2), ("a", 3):
        assert_refused(command([program("ranks"), first, Log(1).write(tmp_path, ranks, run)]),
                       "0000.txt and .*0001.txt are of different runs")
    assert_refused(command([program("ranks"), first, Log(0).write(tmp_path, 2, name="again")]),
                   "again is of rank 0, of which there is another file already")


@pytest.mark.parametrize("options, status", [("--help", 0), ("-h", 0), ("", 1), ("--nope", 1)])
def test_help_is_printed(options, status):
    run = command([program("ranks")], options)
    assert run.status == status and run.out.startswith("usage: build/ranks OUT/ops_rank_*.txt\nSays at which operation"), run
