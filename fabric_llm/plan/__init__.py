"""Flags, data and model -> what will happen: a Plan. Mistakes are found here.

checks         `check_training`, `check_preparation`, `check_export`, `batch_sizes`: what is checked without torch
placement      `place`: devices and strategy, known without torch
start          `start`: the run directory locked, the ranks of this machine started
branch         `branch_flags`: --branch_decay, in terms of other flags
resume         `directory`, `choose`: which run directory and checkpoint a run resumes from
stages         `lay_out`: where each stage of a mixture begins, and where the run ends
mixing         `plan_mixture`: the sources of --data_mix, and their mixture over a run
measuring      `open_eval_data`, `copy_set`: the validation sets besides those of the training data
plan           `make_plan`, `Plan`: flags -> what they mean on this machine, with this dataset and model
same_run       `require_same_run`: what a resumed run may change
warnings       `warnings`: valid flags that are probably a mistake
run_directory  `lock`, `write_status`: checkpoints/RUN, its name, lock and STATUS.json
trackers       `TRACKERS`: csv, TensorBoard, Weights & Biases
events         `record`, `read`: events.jsonl, when a run started, resumed, saved and ended
"""
