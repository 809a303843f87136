"""Text -> documents -> tokens -> rows of one length -> micro-batches, a function of (seed, position, rank).

inputs       check the arguments of prepare_data.py, before anything slow is imported
formats      `kind_of`, `opened`: what a file holds by its name, and its content, decompressed
sources      `SOURCES`: where rows come from; check the folder of a dataset, likewise
documents    `read_part`: the documents of a file, a range of it, or a dataset, and the records that can't be read
pieces       `find_sources`, `plan`: what is read, in pieces that processes and machines share
encoding     `encode_piece`: a piece -> tokens in the work folder, with marks of what is done
generated    `Generated`: documents that a program makes, in place of those that are read
workers      `encode_locally`, `encode_on_ray`: a process for each core, or a cluster
tokenizer    `load_tokenizer`, `packing_tokenizer`, `train_byte_level_bpe`, `convention`
tokenizer_bounds  `check_file`: what a tokenizer.json may declare
corpus       `read`: a corpus in memory, and a part of it held out
new_tokens   `learn`, `extended`: tokens for a tokenizer that is there
duplicates   `repeated`: documents whose text has come before
packing      `best_fit`, `pack`: documents -> rows that only long ones are cut for
rows         `split_documents`, `save_rows`: pieces -> two splits of packed rows
work_folder  where a dataset is made, and what a later start goes on with
prepare      `prepare`: the whole way from text to a dataset folder
demo         `prepare_demo`: the dataset of --demo
columns      the columns of a dataset, and which tokens are targets
dataset      `open_dataset`: a checked `TokenDataset`
order        `permuted`, `random_key`, `RowsRead`: which row is read at which position
blend        `parse`: what --data_mix says: sources, weights, stages
eval_sets    `parse`: what --eval_data says
copy_probe   `passages`: random passages and the same again, which show what a model makes of its context
token_bytes  `bytes_of_tokens`: bytes of text that each token stands for
pattern      `pattern`, `read_before`: which source of a mixture stands at which position
mixture      `Mixture`: which row of which source is read at which position
prompts      `read`: the file of --sample_prompts
views        `Rows`, `Padded`: rows of Arrow files as numpy sees them, without a copy
batches      `Batches`, `Prefetch`: the micro-batches of a rank at a position
"""
