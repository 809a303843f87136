"""The run itself: its objects, a log, saves, rewinds, and how it ends.

reference      `load`, `verify_start`: the model as transformers loads it, and what it is compared with
run            `Run`: what a run holds, and how it is closed
build          `build`: plan -> Run
start          `open_log`: the run directory made ready, and what the run does, said
due            `at`: what follows a step, a function of where the run is
log            `Log`: metrics.jsonl, the tracker, and what is printed
metrics        `MetricsFile`, `Speed`: the file, speed and memory
profiling      `Profile`: --profile, a trace of some steps
samples        `Samples`: what the model in training makes of --sample_prompts
save           `save`, `publish`: when a checkpoint is written, and when it is published
verdicts       `report`, `rewind`: what follows a step or an evaluation that the guard didn't take
supervision    `supervise`: the ranks join, plan, train and end: one sentence, an exit code, STATUS.json
trackers       `TRACKERS`: csv, TensorBoard, Weights & Biases
"""
