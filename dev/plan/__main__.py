"""plan - predicts what a model will need on a number of ranks, before anything is run. doc/plan.md has its questions, what they
print, and what the models assume; GB are 1e9 bytes.

    options.py        the options, what a device says of those that are not given, and the run that they describe
    machines.py       the table of rates: links, devices and nodes; and seconds of messages and collectives
    shapes.py         the table of models
    questions.py      bytes, by the programs' own formulas: it asks train_gpt2_* --predict, and schedule_play for pipelines
    steps.py          seconds of a step, also with compressed gradients; pipelines.py: of pipelines and meshes
    answers.py        what is compared, as tables and JSON
    mesh.py           any mesh of any model; search.py finds the best one; validate.py compares with published.toml
"""
import sys
from pathlib import Path
sys.path.append(str(Path(__file__).resolve().parents[1] / "tools")) # tool.py
import answers
import options
import search
import validate
from tool import dump_json

o = options.parse()
answer = (validate.answer if o.validate else search.answer if o.mesh == "all" else answers.answer_params if o.params > 0 else
          answers.answer_methods if o.compress == "all" else answers.answer_model)
items, as_json = answer(o)
if o.json: print(dump_json(as_json()))
else: answers.show(o, items)
