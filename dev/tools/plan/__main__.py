"""plan - predicts what a model will need on a number of ranks, before anything is run. doc/plan.md has its questions, what they
print, and what the models assume; GB are 1e9 bytes.

    options.py        the options, what a device (machines.py) says of those that are not given, and the run that they describe
    questions.py      bytes, by the programs' own formulas: it asks train_gpt2_* --predict, and schedule_play for pipelines
    machines.py       devices and links, and seconds of messages; nccl.py: of a collective, as NCCL expects them
    steps.py          seconds of a step, also with compressed gradients; pipelines.py: of pipelines and meshes
    tables.py         what is compared, as tables and JSON
    mesh.py           any mesh of any model (shapes.py); search.py chooses one; validate.py compares with published.toml
"""
import sys
from pathlib import Path
sys.path.append(str(Path(__file__).resolve().parents[1])) # tool.py
import options
import search
import tables
import validate
from tool import dump_json

o = options.parse()
if o.validate: printed, as_json = validate.print_validation, validate.json_validation
elif o.recommend: printed, as_json = search.print_recommendation, search.json_recommendation
elif o.cp == "all": printed, as_json = tables.print_context_bytes, tables.json_context
elif o.params > 0: printed, as_json = tables.print_params, tables.json_params
elif o.compress == "all": printed, as_json = tables.print_methods, tables.json_methods
else: printed, as_json = tables.print_model, tables.json_model
if o.json: print(dump_json(as_json(o)))
else: printed(o)
