"""The run itself: its objects, a log, saves, rewinds, and how it ends.

reference      `load`, `verify_start`: the model as transformers loads it, and what it is compared
               with
run            `Run`: what a run holds, and how it is closed
build          `build`: plan -> Run; the run directory is made ready, and what the run does is said
metrics        `MetricsFile`, `of_code`: metrics.jsonl, and the metrics of --code
trackers       `Trackers`: csv, TensorBoard, Weights & Biases, MLflow
log            `Log`: what goes to both, and what is printed
lines          the lines that are printed about a step and an evaluation
speed          `Speed`: tokens and FLOPs per second, waits, peak memory
profile        `Profile`: the trace of --profile
samples        `Samples`: what the model in training makes of --sample_prompts
save           `due_after`, `save`, `publish`: what follows a step; when a checkpoint is written,
               and when it is published
copies         `readable`: where ranks that don't see rank 0's disk read a checkpoint
verdicts       `report`, `rewind`: what follows a step that wasn't taken, or too much forgotten
fallback       `without_fast_path`: a fast path that fails before the first step is done
supervision    `supervise`: the ranks join, plan, train and end: one sentence, an exit code,
               STATUS.json
"""
