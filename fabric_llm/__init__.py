"""Continue the pretraining of a Hugging Face causal language model. The README has the map."""
