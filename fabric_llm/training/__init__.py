"""The numbers of a step: what train.py's loop calls between a batch and the updated weights.

step        `count_targets`, `accumulate`, `backward`, `clip`, `share`: the parts of a step, in their order
schedule    `SCHEDULES`, `lr_at`: the learning rate as a function of the step
optim       `make_optimizer`, `parameter_groups`: the optimizer, and which parameters decay
adamw       `AdamW`: small updates survive in bfloat16, by one of the kernels below
adamw_rounded   `rounded_step`: stochastic rounding that depends neither on devices nor on sharding
adamw_plain, adamw_triton    the same update in plain PyTorch and in Triton; adamw.cpp is that of a CPU
ema         `Average`, `update`: a moving average of the weights, sharded and saved as the optimizer's state is
updates     `size`, `Drift`: how far the weights go in a step, and from where the run began
guard       `Guard`, `Forgetting`: which steps are taken, skipped or undone, and what may be forgotten
evaluation  `Evaluation`: the loss of each validation set, also in bits per byte
"""
