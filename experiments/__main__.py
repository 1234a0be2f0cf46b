"""Answers questions by running the programs, and makes the tables of the chapters.

  python3 -m experiments NAME [OPTION...] [OPTION OF THE PROGRAMS...]      in the root of the repository
  python3 -m experiments [OPTION...]                  all that have pages, one after another: `make experiments`

NAME is a file in this folder: NAME --help explains its question and its own options. make builds the programs that an
experiment with a page needs. Only --store changes results and pages under experiments/. A finished experiment leaves
build/experiments/NAME.done and is skipped the next time that all are run, so you can interrupt this and start it again;
remove these files to start over. If one experiment fails, for example for lack of memory, the others still run.
Experiments with pages take these options:

--store         also store the results in experiments/NAME/results/DATE.jsonl, and update the pages
--quick         a small model and one round, in seconds: tests the script, and measures nothing
--rounds N      repeat each run so often, in turns (the default depends on the experiment)
--no-speed      leave speeds out, because the machine is busy; memory and bytes do not depend on that
--into FILE     where the results go; default build/experiments/NAME.jsonl, with --quick build/experiments/NAME.quick.jsonl
--from FILE     run nothing; print the answer that follows from this file's results
--pages         only make the pages again, from stored results or --from FILE; --out FOLDER: there

DEVICE=cuda|cpu    build to use; default: cuda if nvcc and a GPU are present
OMP_NUM_THREADS    threads of a rank on the CPU (default 1, for one rank as for many)
MPIRUN             how to start ranks (dev/on_ranks.sh)"""
from dev.lib.experiment import main

if __name__ == "__main__": main(__doc__)
