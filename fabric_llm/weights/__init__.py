"""What is done with finished weights: exported, averaged, merged, extended by new words.

checks   `check`: the flags of export_hf.py; `exported_output`: a folder that a model is written to
export   `export`: a checkpoint to a Hugging Face directory that equals the trained model, with
         `Proof`
average  `average`: a weighted sum of models, tensor by tensor, and its loss; `python -m
         fabric_llm.average`
line     `choose`: the point between a base model and a run that learned most inside a budget, or
         the knee
extend   `extend`: new tokens for a tokenizer and its model; `python -m fabric_llm.extend_vocab`
card     `write`: README.md of an exported model, from its checkpoint and its run, and card.md,
         which is filled in
"""
