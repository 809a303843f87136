"""Flags, data and model -> a Plan of the run. Mistakes are found here.

run_status     `write_status`, `record_event`: STATUS.json and events.jsonl, what a run says of
               itself
run_directory  `directory`, `lock`: checkpoints/RUN, its name and lock
resumption     `choose`: the checkpoint to resume from
schedule       `plan_schedule`, `Schedule`: the steps of a run and the rows that they read; a rewind
               changes it
start          `place`, `start`: devices, batches over them, and the ranks of this machine
demo           `prepare_demo`: the dataset of `python train.py` without flags
fetched        `folder`: of a dataset, also one that an address names
checks         `check_training`: what is checked without torch
plan           `Plan`: what the run will do, with which model and data
same_run       `require_same_run`: what a resumed run must have in common with its checkpoint, and
               what it changes on purpose
mirrored       `open_mirror`: what --mirror brings back before a run begins, and what is said of it
data_plan      `plan_data`: the datasets of a run, opened, and compared with each other
model_plan     `plan_model`: its model, and whether it can do what the flags ask for
make_plan      `make_plan`: flags -> what they mean on this machine, with this dataset and model
warnings       `warnings_of`: valid flags that are probably a mistake
"""
