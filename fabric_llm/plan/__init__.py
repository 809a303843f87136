"""Flags, data and model -> a Plan of the run. Mistakes are found here.

run_directory  `directory`, `lock`, `choose`: checkpoints/RUN, its name, lock, STATUS.json and the checkpoint to resume from
mixture        `lay_out`: where each stage of a mixture begins, and where the run ends
start          `place`, `start`: devices, batches over them, and the ranks of this machine
checks         `check_training`, `check_preparation`, `check_export`: what is checked without torch
plan           `Plan`: what the run will do, step by step
same_run       `require_same_run`: what a run has in common with its checkpoint, and what it changes on purpose
make_plan      `make_plan`: flags -> what they mean on this machine, with this dataset and model
accelerators   `accelerator`: a small table of devices, with links; how long a step takes at most
memory         `predict`: bytes of a rank on its device, at which moment of a step, without making one
outlook        `look`: memory of device and host, disk, time and money of a run, from flags and a config.json
changes        `until_it_fits`, `fastest`: other flags, where these don't fit, or for a shorter step
sweep          `sweep`: the same on more and more devices
trace          `Ledger`, `Layers`: a step on fake tensors, of which all storages are counted
warnings       `warnings_of`: valid flags that are probably a mistake
"""
