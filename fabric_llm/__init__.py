"""Continue the pretraining of a Hugging Face causal language model, in rooms with one idea each.

What trains:

base        files, faults, ranks and the command line, which all rooms use
data        rows -> mixture -> (seed, position, rank) -> micro-batches
processes   start the ranks, hear their heartbeats, stop them
model       load a model from transformers, shard it, compare it with the reference
training    the numbers of a step: schedule, gradients, optimizer, guard, evaluation
checkpoint  take, write, publish, load and keep checkpoints
mirror      a copy of checkpoints in object storage, and the way back
plan        flags, data and model -> what will happen: a Plan; mistakes are found here
run         the run itself: log, save, evaluate, sample, rewind, end

What works on folders, and is imported by nothing that trains:

prepare     text -> documents -> tokens -> rows
weights     what is done with finished weights: export, average, card, new tokens
report      runs to look at: `python -m fabric_llm.report`
verify      prove a run: `python -m fabric_llm.verify`
forecast    memory, time and money of a run that hasn't begun: `python plan.py`

Four commands stand beside the rooms: `python -m fabric_llm.average`, `python -m
fabric_llm.choose`, `python -m fabric_llm.extend_vocab` and `python -m fabric_llm.generate`. `python
-m fabric_llm` lists all of them.

Imports go one way: base <- data, processes <- model <- training, checkpoint <- mirror <- plan,
prepare <- run <- weights, report <- verify, forecast and the scripts. No room imports arguments.py.
The `__init__.py` of a room lists its modules and imports nothing. docs/tour.md follows a batch, a
flag and a checkpoint through the rooms.
"""

import sys

if sys.version_info < (3, 11):  # here, before a module that such a Python can't read
    sys.stderr.write(
        "error: fabric_llm needs Python 3.11 or newer, which %s isn't: see README.md, Start.\n"
        % sys.executable
    )
    sys.exit(2)
