"""Flags, data and model -> what will happen: a Plan. Mistakes are found here.

checks           `check_training`, `check_preparation`, `check_export`, `batch_sizes`: what is checked without torch
evaluation_sets  `require_names`: the names of what a run is evaluated on
placement        `place`: devices and strategy, known without torch
run_directory    `lock`, `write_status`, `record_event`: checkpoints/RUN, its name, lock, STATUS.json and events.jsonl
start            `start`: the run directory locked, the ranks of this machine started
mixture          `lay_out`: where each stage of a mixture begins, and where the run ends
data             `plan_data`: the datasets of a run, opened and compared
plan             `Plan`: what the run will do, step by step
resume           `directory`, `choose`: which run directory and checkpoint a run goes on from
same_run         `require_same_run`: what a run has in common with its checkpoint, and what it changes on purpose
make_plan        `make_plan`: flags -> what they mean on this machine, with this dataset and model
warnings         `warnings`: valid flags that are probably a mistake
"""
