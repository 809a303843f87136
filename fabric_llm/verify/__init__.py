"""Prove what was trained, and what is done with finished weights. `python -m fabric_llm.verify` verifies a run.

inspect_run  `verify_run`: everything about a run, as a `Report`
drill        `drill`: train twice, kill and resume one run, compare bit for bit
export       `export`: a checkpoint to a Hugging Face directory that equals the trained model, with `Proof`
average      `average`: a weighted sum of models, tensor by tensor, and its loss; `python -m fabric_llm.average`
line         `choose`: the point between a base model and a run that learned most inside a budget, or the knee
extend       `extend`: new tokens for a tokenizer and its model; `python -m fabric_llm.extend_vocab`
"""
