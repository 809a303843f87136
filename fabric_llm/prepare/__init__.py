"""Raw text -> documents -> tokens -> rows of one length, in a dataset folder.

inputs       check the arguments of prepare_data.py, before anything slow is imported
formats      `kind_of`, `opened`: what a file holds by its name, and its content, decompressed
documents    `read_part`: the documents of a file, a range of it, or a dataset, and the records that can't be read
pieces       `find_sources`, `plan`: what is read, in pieces that processes and machines share
encoding     `encode_piece`: a piece -> tokens in the work folder, with marks of what is done
generated    `Generated`: documents that a program makes, in place of those that are read
workers      `encode_locally`, `encode_on_ray`: a process for each core, or a cluster
tokenizer    `load_tokenizer`, `packing_tokenizer`, `train_byte_level_bpe`, `convention`
tokenizer_bounds  `check_file`: what a tokenizer.json may declare
corpus       `read`: a corpus in memory, and a part of it held out
duplicates   `repeated`: documents whose text has come before
packing      `best_fit`, `pack`: documents -> rows that only long ones are cut for
rows         `split_documents`, `save_rows`: pieces -> two splits of packed rows
work_folder  where a dataset is made, and what a later start goes on with
prepare      `prepare`: the whole way from text to a dataset folder
demo         `prepare_demo`: the dataset of --demo
"""
