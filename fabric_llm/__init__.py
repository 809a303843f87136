"""Continue the pretraining of a Hugging Face causal language model: eleven rooms, each with one
idea.

base        files, faults, ranks and the command line, which all rooms use
prepare     text -> documents -> tokens -> rows
data        rows -> mixture -> (seed, position, rank) -> micro-batches
processes   start the ranks, hear their heartbeats, stop them
model       load a model from transformers, shard it, compare it with the reference
training    the numbers of a step: schedule, gradients, optimizer, guard, evaluation
checkpoint  take, write, publish, load and keep checkpoints
plan        flags, data and model -> what will happen: a Plan; mistakes are found here
run         the run itself: log, save, evaluate, sample, rewind, end
verify      prove a run, and what is done with finished weights: `python -m fabric_llm.verify`
report      runs to look at, after and before: `python -m fabric_llm.report`, `python plan.py
            --html`

Three commands stand beside the rooms: `python -m fabric_llm.average`, the average of checkpoints,
and `python -m fabric_llm.extend_vocab`, new tokens for a model, whose work is in verify, and
`python -m fabric_llm.generate`. `python -m fabric_llm` lists all of them.

Imports go one way: base <- data, processes <- prepare <- model <- training, checkpoint <- plan <-
run <- verify <- report and the scripts. A room may import those before it, and none imports
arguments.py. The `__init__.py` of a room lists its modules and imports nothing. docs/tour.md
follows a batch, a flag and a checkpoint through the rooms.
"""

import sys

if sys.version_info < (3, 11):  # here, before a module that such a Python can't read
    sys.stderr.write(
        "error: fabric_llm needs Python 3.11 or newer, which %s isn't: see README.md, Start.\n"
        % sys.executable
    )
    sys.exit(2)
