"""What measurements, tests and labs share: scripts, programs and ranks, what runs write, results, the machine in words.

Everything in here is run from the root of the repository, as in `python3 -m experiments NAME`, so that Python finds it there."""
from dev.lib.script import *
from dev.lib.machine import *
from dev.lib.runs import *
from dev.lib.programs import *
from dev.lib.results import *
