"""plan - predicts the memory and time of a model on any number of ranks, before anything runs. doc/plan.md explains its questions,
output and assumptions; GB are 1e9 bytes. plans.py describes a run and asks the programs for its bytes, steps.py and pipelines.py
simulate its seconds, answers.py prints both."""
from tool import dump_json
from dev.plan import answers, plans, search, validate

o = plans.parse()
answer = (validate.answer if o.validate else search.answer if o.mesh == "all" else answers.answer_params if o.params > 0 else
          answers.answer_methods if o.method == "all" else answers.answer_model)
items, as_json = answer(o)
if o.json: print(dump_json(as_json()))
else: answers.show(items)
