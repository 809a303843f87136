"""The numbers of a step: what train.py's loop calls between a batch and the updated weights.

step        `count_targets`, `accumulate`, `backward`, `clip`, `share`, `take`, `update_size`: the
            parts of a step, in their order
schedule    `SCHEDULES`, `lr_at`: the learning rate as a function of the step
adamw       `make_optimizer`, `AdamW`: small updates survive in bfloat16
adamw_rounded, adamw_triton its stochastic rounding, the same on any devices: plain PyTorch,
adamw.cpp for a CPU, Triton
ema         `Average`: a moving average of the weights, sharded and saved as the optimizer's state
            is
guard       `Guard`: which steps are taken, skipped or undone
forgetting  `Forgetting`: how far the losses of validation sets may rise, and what follows
evaluation  `Evaluation`: the loss of each validation set, also in bits per byte
"""
