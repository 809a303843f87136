"""Rows -> mixture -> (seed, position, rank) -> micro-batches: functions without hidden state.

sources      `SOURCES`: where rows come from; `parse_eval_data`; checks of folders before they are opened
columns      `Rows`: columns as numpy sees them, without a copy, and which of their tokens are targets
dataset      `open_dataset`: a checked `TokenDataset`
order        `permuted`, `random_key`, `RowsRead`: which row is read at which position
mixture_text `parse`: what --data_mix says: sources, and the stages of a run with their weights
copy_probe   `passages`: random passages and the same again, which show what a model makes of its context
token_bytes  `bytes_of_tokens`: bytes of text that each token stands for
stages       `period_of`, `read_before`: which source of a mixture stands at which position
mixture      `Mixture`: which row of which source is read at which position
prompts      `read`: the file of --sample_prompts
batches      `Batches`, `Prefetch`: the micro-batches of a rank at a position
"""
