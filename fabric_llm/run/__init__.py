"""One run from its flags to its end: joined ranks, a plan, the objects of the loop, a log, saves, and how it ends.

mistakes       `in_training`, `in_preparation`, `in_export`: mistakes that need no torch
flag_rules     `numbers`, `batch_sizes`, `sizes`, `profiled_steps`: ranges of flags, and how batches divide
placement      `place`: devices and strategy, known without torch
starting       `start`: the run directory locked, the ranks of this machine started
joining        `join`, `plan_together`: all ranks, with the same plan
branch         `branch_flags`: --branch_decay, in terms of other flags
resume         `directory`, `choose`: which run directory and checkpoint a run resumes from
stages         `lay_out`: where each stage of a mixture begins, and where the run ends
mixing         `plan_mixture`: the sources of --data_mix, and their mixture over a run
measuring      `open_eval_data`, `copy_set`: the validation sets besides those of the training data
plan           `make_plan`, `Plan`: flags -> what they mean on this machine, with this dataset and model
same_run       `require_same_run`: what a resumed run may change
doubts         `doubts`: one warning for each flag that has no effect or is hardly meant
reference      `load`, `verify_start`: the model as transformers loads it, and what it is compared with
build          `build`: plan -> model, optimizer, data, log, evaluation, saver
due            `at`: what follows a step, a function of where the run is
log            `Log`: metrics.jsonl, the tracker, and what is printed
metrics        `MetricsFile`, `Throughput`, `Speed`: the file, speed and memory
profiling      `Profile`: --profile, a trace of some steps
events         `record`, `read`: events.jsonl, when a run started, resumed, saved and ended
samples        `Samples`: what the model in training makes of --sample_prompts
trackers       `TRACKERS`: csv, TensorBoard, Weights & Biases
saver          `Saver`: when a checkpoint is written, and when it is published
verdicts       `report`, `rewind`: what follows a step or an evaluation that the guard didn't take
run_directory  `lock`, `write_status`: checkpoints/RUN, its name, lock and STATUS.json
ending         `supervise`, `close`: one sentence, an exit code, STATUS.json
"""
