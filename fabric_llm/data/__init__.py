"""Text -> documents -> tokens -> rows of one length -> micro-batches, a function of (seed, position, rank).

inputs     check the arguments of prepare_data.py, before anything slow is imported
sources    `SOURCES`: where rows come from; check the folder of a dataset, likewise
documents  `find_sources`, `read_documents`: text from files, folders and the hub
tokenizer  `load_tokenizer`, `packing_tokenizer`, `train_byte_level_bpe`, `encoder`
rows       `split_documents`, `save_rows`: tokens to two splits of packed rows
prepare    `prepare`: the whole way from text to a dataset folder
demo       `prepare_demo`: the dataset of --demo
columns    the columns of a dataset, and which tokens are targets
dataset    `open_dataset`: a checked `TokenDataset`
order      `permuted`, `random_key`, `RowsRead`: which row is read at which position
blend      `parse`: what --data_mix says: sources, weights, stages
pattern    `pattern`, `read_before`: which source of a mixture stands at which position
mixture    `Mixture`: which row of which source is read at which position
views      `Rows`: rows of Arrow files as numpy sees them, without a copy
batches    `Batches`, `Prefetch`: the micro-batches of a rank at a position
"""
