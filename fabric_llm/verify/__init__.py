"""Prove what was trained, and what is done with finished weights. `python -m fabric_llm.verify` verifies a run.

inspect_run         `verify_run`: everything about a run, as a `Report`
inspect_checkpoint  `verify_checkpoint`: files, tensors and rows of one checkpoint
inspect_log         STATUS.json and metrics.jsonl
report              `Report`: findings, printed as they are found
drill               `drill`: train twice, kill and resume one run, compare bit for bit
model_folder        a Hugging Face directory: written, opened with plain transformers, and named once it is proven
export              `export`: a checkpoint to such a directory that equals the trained model, with `Proof`
average             `average`: a weighted sum of models, tensor by tensor; `python -m fabric_llm.average`
average_parts       which directories are averaged, and what each of them counts
average_losses      the validation loss of each part and of the average
extend              `extend`: a model with more tokens; `python -m fabric_llm.extend_vocab`
new_tokens          `learn`, `extended`: tokens for a tokenizer that is there
new_rows            `add_rows`: rows of the embedding and the output head for them
"""
