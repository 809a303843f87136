"""Prove what was trained: verify a run, export it, rehearse its crash. `python -m fabric_llm.verify` is the command.

inspect_run         `verify_run`: everything about a run, as a `Report`
inspect_checkpoint  `verify_checkpoint`: files, tensors and rows of one checkpoint
inspect_log         STATUS.json and metrics.jsonl
report              `Report`: findings, printed as they are found
export              `export`: a checkpoint to a Hugging Face directory that equals the trained model, with `Proof`
extend              `extend`: a model with more tokens, written and proven; `python -m fabric_llm.extend_vocab`
drill               `drill`: train twice, kill and resume one run, compare bit for bit
"""
