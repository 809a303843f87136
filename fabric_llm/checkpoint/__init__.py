"""Checkpoints: take the tensors, write them, publish the folder, load it again, and decide which
ones stay.

keep         `Progress`, `verified`, `newest_valid`: what a checkpoint says, and whether it is whole
retention    `Kept`, `prune`, `move_aside`, `sweep`: which checkpoints of a run stay
state_dicts  tensors of a wrapped model and its optimizer, by the names that transformers knows
writing      `begin`, `write`, `commit`: the three acts of a save; `Background` for the second in a
             thread
apart        `find`, `send`, `receive`: ranks of machines that don't see rank 0's disk
whole        `Pieces`: whole weights for files that `from_pretrained` opens, unit by unit
trainer_state
             `optimizer_state`, `read_probe`: what the files hold beside the weights
reading      `load_optimizer`: the optimizer's state, on any number of ranks
"""
