"""Raw text -> documents -> tokens -> rows of one length, in a dataset folder.

inputs       `find_sources`: what is read; and checks of all arguments, before anything slow is imported
formats      `kind_of`, `opened`: what a file holds by its name, and its content, decompressed
documents    `read_part`: the documents of a file, a range of it, or a dataset, and the records that can't be read
pieces       `plan`: what is read, in pieces that processes and machines share
encoding     `encode_piece`: a piece -> tokens in the work folder, with marks of what is done; or documents that a program makes
workers      `encode_locally`, `encode_on_ray`: a process for each core, or a cluster
tokenizer    `load_tokenizer`, `packing_tokenizer`, `train_byte_level_bpe`, `convention`
tokenizer_bounds  `check_file`: what a tokenizer.json may declare
corpus       `read`: a corpus in memory, and a part of it held out
splits       `split_documents`: pieces -> two splits, without documents whose text has come before
rows         `save_rows`: documents -> rows, which `concat` or `best_fit` fills, in a dataset folder
work_folder  where a dataset is made, and what a later start goes on with
prepare      `prepare`: the whole way from text to a dataset folder
demo         `prepare_demo`: the dataset of --demo
"""
