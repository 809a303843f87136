"""Checkpoints: take the tensors, write them, publish the folder, load it again, and decide which ones stay.

progress     `Progress`, `read_progress`: where a run is
state_dicts  tensors of a wrapped model and its optimizer, by the names that transformers knows
tensors      `Tensors`: what safetensors files hold, whole or in parts, one tensor at a time
writing      `begin`, `write`, `commit`: the three acts of a save; `Background` for the second in a thread
reading      `verified`, `load_optimizer`, `sharded_weights`: a checkpoint that is whole, on any number of ranks
keep         `newest_valid`, `prune`, `move_aside`, `sweep`: the checkpoints of a run
"""
