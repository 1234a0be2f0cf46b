"""A run is killed before each call by which a save changes its folder, one after the other: whatever the instant, the last good
checkpoint loads, and the run continues to the bits of one that was never killed."""
import re, shutil
import pytest
from suite import TINY, assert_same, command, once, rest, trained
from shards import in_folder, newest

# A constant schedule does not depend on --steps, which may therefore differ from run to run.
SAVING = f"{TINY} --batch-size 4 --total-batch-size 64 --warmup-steps 0 --lr-schedule constant --save-every 1 --keep 2"
# Counts the calls that may change a folder, from the first one in a save on. The process dies before call KILL_AT, or half-way in a
# write.
KILLER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static long calls = -1;
static int comes(const char* path) {
    if (calls < 0 && path && strstr(path, "/.tmp_step_")) calls = 0;
    return calls >= 0 && calls++ == atol(getenv("KILL_AT"));
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(name, path, parameters, arguments) int name parameters { if (comes(path)) raise(SIGKILL); return REAL(name) arguments; }
WRAP(mkdir, path, (const char* path, mode_t mode), (path, mode))
WRAP(rename, NULL, (const char* from, const char* to), (from, to))
WRAP(unlink, NULL, (const char* path), (path))
WRAP(rmdir, NULL, (const char* path), (path))
WRAP(unlinkat, NULL, (int fd, const char* path, int flags), (fd, path, flags))
WRAP(fsync, NULL, (int fd), (fd))
WRAP(close, NULL, (int fd), (fd))
WRAP(ftruncate, NULL, (int fd, off_t size), (fd, size))
WRAP(posix_fallocate, NULL, (int fd, off_t at, off_t n), (fd, at, n))
ssize_t pwrite(int fd, const void* data, size_t n, off_t at) {
    if (comes(NULL)) { REAL(pwrite)(fd, data, n / 2, at); raise(SIGKILL); }
    return REAL(pwrite)(fd, data, n, at);
}
__attribute__((destructor)) static void tell(void) { if (calls >= 0) fprintf(stderr, "calls: %ld\\n", calls); }
"""


def killer():
    def compile(place):
        (place / "killer.c").write_text(KILLER)
        assert command(["cc", "-shared", "-fPIC", "-o", place / "killer.so", place / "killer.c", "-ldl"]).status == 0
    return once("killer.so", compile) / "killer.so"


def killed(folder, at):
    """A run that has saved steps 1 and 2 saves two more, and is killed at a call. Steps are removed, too."""
    shutil.copytree(trained("single", SAVING, "--steps 2").folder, folder)
    return in_folder(folder, "single", SAVING, "--resume --steps 4", env={"LD_PRELOAD": killer(), "KILL_AT": at})


@pytest.mark.parametrize("first", [0, *map(rest, range(1, 8))])
def test_whenever_a_run_is_killed_the_last_good_checkpoint_loads_and_continues_to_the_bit(first, tmp_path):
    whole = killed(tmp_path / "whole", -1)
    calls, saved, left_half = int(re.search(r"^calls: (\d+)$", whole.err, re.M)[1]), set(), 0
    assert whole.status == 0 and calls > 60, whole
    for at in range(first, calls, 8):
        folder = tmp_path / str(at)
        run = killed(folder, at)
        assert run.status == -9, run
        step = newest(folder)
        saved.add(step)
        left_half += any(folder.glob(".tmp*"))
        again = in_folder(folder, "single", SAVING, "--resume --steps 5")
        assert again.status == 0 and f"start      step {step} of 5" in again.out, (at, again)
        assert [*folder.glob(".*")] == [] and len([*folder.glob("step_*")]) == 2
        assert_same(trained("single", SAVING, "--steps 5"), again)
        shutil.rmtree(folder)
    assert saved == {2, 3, 4} and left_half > 0 # no saved step was lost, and every kind of instant was there
