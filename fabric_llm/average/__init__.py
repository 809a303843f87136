"""`python -m fabric_llm.average checkpoints/RUN --last 5 --output hf/mine`: averages of checkpoints, as a verified model.

parts       which directories are averaged, and `Part`: one of them, once it is verified
tensors     the tensors of a model on disk, one at a time, by the names that Hugging Face files have
weighting   what each part counts: equal weights, those that imitate a decay of the learning rate, or given ones
summing     the average, tensor by tensor, written to a Hugging Face directory and verified there
evaluating  the validation loss of each part and of the average
"""
