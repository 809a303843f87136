"""Rows -> mixture -> (seed, position, rank) -> micro-batches: functions without hidden state.

sources      `open_source`: where rows come from; checks of folders before they are opened; the
             files of --eval_data, --sample_prompts
columns      `Rows`: columns as numpy sees them, without a copy, and which of their tokens are
             targets
probes       `copy_probe`, `Questions`: rows that ask whether a model uses its context
tasks        `Tasks`, `open_tasks`: tasks of lm-evaluation-harness as a validation set
folders      `split_names`, `has_rows`: the files of a dataset folder, before `datasets` is imported
dataset      `open_dataset`: a checked `TokenDataset`
own          `open_own`, `Stream`: rows and streams of sources that --code registers
order        `permuted`, `random_key`, `RowsRead`: which row is read at which position
periods      `period_of`, `read_before`: which source of a mixture stands at which position
mixture_text `parse`: what --data_mix says
stages       `lay_out`: where the stages of a mixture begin in a run, and where it ends
mixture      `Mixture`: what a run reads of which sources
mixed_rows   `mixed_rows_at`: which row of which source is read at which position
batches      `Batches`, `Prefetch`: the micro-batches of a rank at a position
token_bytes  `bytes_of_tokens`: bytes of text that each token stands for; `unknown_id`
"""
