"""A causal language model from transformers: loaded once, sharded over the devices, and equal to the reference.

folders         `check_model_folder`: what is wrong with a model's directory, before torch is imported
bounds          `check_document`, `try_out`: what a configuration may declare
loading         `load_config`, `build_skeleton`, `load_reference`: transformers' model without and with its weights
classes         model classes of your own, registered with transformers
language_model  `LanguageModel`, `token_loss`: the model that returns its loss
loss_head       `chunked_loss`: the loss and its gradients without the logits of a whole batch
packed_attention  `attention`: of each packed document by itself, without a mask
layers          `checkpoint_activations`, `compile_layers`: what is done to each of the repeated layers
fast_paths      `chunks_its_loss`, `takes_packed_attention`: which fast paths a model can take
router          `load_balancing_loss`: the auxiliary loss of mixtures of experts
materialize     `Materializer`: memory and values for a skeleton, module by module
strategy_rules  `Sharding`, `strategy`: which strategies go with which flags, without torch
strategy        `make_fabric`, `wrap`: FSDP, FSDP2, DDP, one device, TPU; nothing else knows about sharding
causality       `find_leak`, `sees_ahead`: which tokens a logit depends on
flops           `of_model`, `peak_tflops`: operations of a step, and what a device can do
equality        `verify_start`: is the wrapped model the one that transformers loads?
freezing        `frozen_names`, `freeze`: which parameters --freeze and --train_only mean
gradient_equality  `verify`: does it give the loss and the gradients of plain transformers?
generate        `generate`: the sample at the end of a run
self_replay     `self_replay`: documents sampled from a model, to be replayed
"""
