"""plan - predicts what a model will need on a number of ranks, before anything is run.

    build/plan --model gpt2-xl --ranks 8 --seq-len 1024 --batch-size 4
    build/plan --params 7.5e9 --ranks 64
    build/plan --model gpt2 --link measured.json --compute-ms 120
    build/plan --model d32 --ranks 64 --tensor-parallel 8 --sequence-parallel
    build/plan --model gpt2 --ranks 8 --pipeline-parallel 4 --accumulation 16
    build/plan --model gpt2 --ranks 8 --pipeline-parallel 4 --accumulation 16 --schedule 1f1b --split 4,4,4,0
    build/plan --recommend --model gpt3-13b --gpu h100 --ranks 64 --tokens 300e9
    build/plan --validate
    build/plan --compress all --model gpt2 --ranks 4 --precision fp32 --compute-ms 10 --communication-ms 8

They print bytes per rank and seconds per step of every stage; the bytes of so many parameters; times on measured links and compute
(comm_bench --json, a run on one rank); one number of ranks that share a replica; the schedules of a pipeline, or its ranks; the
best mesh, and why; predictions beside published figures; all ways to compress gradients. GB are 1e9 bytes. See doc/plan.md.

    options.py        the options, what a device (machines.py) says of those that are not given, and the run that they describe
    questions.py      bytes, by the stages' own formulas: it asks train_gpt2_* --predict, and schedule_play for pipelines
    machines.py       devices and links, and seconds of messages; nccl.py: of a collective, as NCCL expects them
    steps.py          seconds of a step, also with compressed gradients; pipelines.py: of pipelines and meshes
    tables.py         what is compared, as tables and JSON; answers.py: other questions
    mesh.py           any mesh of any model (shapes.py); search.py chooses one; validate.py compares with published.toml
"""
import sys
from pathlib import Path
sys.path.append(str(Path(__file__).resolve().parents[1])) # tool.py
import answers
import options
import tables
import validate
from tool import dump_json

o = options.parse()
if o.validate: printed, as_json = validate.print_validation, validate.json_validation
elif o.recommend: printed, as_json = answers.print_recommendation, answers.json_recommendation
elif o.params > 0: printed, as_json = answers.print_params, answers.json_params
elif o.compress == "all": printed, as_json = answers.print_methods, answers.json_methods
else: printed, as_json = tables.print_model, tables.json_model
if o.json: print(dump_json(as_json(o)))
else: printed(o)
