"""Raw text -> documents -> tokens -> rows of one length, in a dataset folder.

checks            `check`: the flags of prepare_data.py
inputs            `find_sources`: what is read, by names; checks of all arguments, before anything
                  slow is imported
compression       `opened`: a file, decompressed as its first bytes say
storage           `corpus`: inputs at an address, fetched; `send`: a dataset, put at an address
documents         `read_part`: the documents of a file, a range of it, or a dataset, and the records
                  that can't be read
table_rows        `rows_of_csv`, `rows_of_tsv`: the rows of a table with wrong quotation marks
corpus            `plan`: what is read, in pieces that processes share; `read`: in memory, a part of
                  it held out
contamination     `read`: what documents mustn't share with evaluation sets; `shared`: what one does
encoding          `encode_piece`: a piece -> tokens in the work folder; by a process for each core
tokenizer         `packing_tokenizer`, `train_byte_level_bpe`, `convention`
new_tokens        `learn`, `extended`: new tokens for a tokenizer
rows              `split_documents`: pieces -> two splits, without repeated documents; `save_rows`:
                  rows in a dataset folder
prepare           `prepare`: the whole way from text to a dataset folder, by way of the work folder
                  beside it; `require_all_counted`: what was read is in a split, or counted
summary           `summary`: what is told of a dataset once it is made
tasks             `prepare_tasks`: tasks of lm-evaluation-harness -> a validation set of their
                  requests
"""
