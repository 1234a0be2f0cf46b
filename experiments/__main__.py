"""Questions that runs of the programs answer, and the tables of the chapters.

  python3 -m experiments NAME [OPTION...] [OPTION OF THE PROGRAMS...]      in the root of the repository
  python3 -m experiments [OPTION...]                  all that have pages, one after another: `make experiments`

NAME is a file here: NAME --help says what it asks, and its own options. make builds the programs that a page's experiment
needs. Results and pages under experiments/ are written only with --store. A finished experiment leaves
build/experiments/NAME.done and is skipped the next time that all are run, so you can interrupt this and start it again; remove
these files to start over. If an experiment fails, for example because it needs more memory than there is, the others still run.
These are the options of experiments that have pages:

--store         also store the results in experiments/NAME/results/DATE.jsonl, and update the pages
--quick         a small model and one round, in seconds: shows that the script works, and measures nothing
--rounds N      how often each run is repeated, in turns (each experiment has its default)
--no-speed      leave speeds out, because the machine is busy; memory and bytes do not depend on that
--into FILE     where the results go; default build/experiments/NAME.jsonl, with --quick build/experiments/NAME.quick.jsonl
--from FILE     print the answer that this file's results give, and run nothing
--pages         only make the pages again, from stored results or --from FILE; --out FOLDER: there

DEVICE=cuda|cpu    which build; default: cuda where nvcc and a GPU are there
OMP_NUM_THREADS    threads of a rank on the CPU (default 1, for one rank as for many)
MPIRUN             how to start ranks (dev/on_ranks.sh)"""
from dev.lib.experiment import main

if __name__ == "__main__": main(__doc__)
