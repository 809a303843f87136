"""A causal language model from transformers: loaded once, sharded over the devices, and equal to the reference.

folders         `check_model_folder`: what is wrong with a model's directory, before torch is imported
bounds          `check_document`, `limited`: what a configuration may declare
loading         `load_config`, `build_skeleton`, `load_reference`, `Materializer`: transformers' model, without and with memory
language_model  `LanguageModel`, `token_loss`: the model that returns its loss
loss_head       `chunked_loss`: the loss and its gradients without the logits of a whole batch
packed_attention  `attention`: of each packed document by itself, without a mask
router          `load_balancing_loss`: the auxiliary loss of mixtures of experts
layers          `checkpoint_activations`, `compile_layers`: what is done to each of the repeated layers
freezing        `frozen_names`, `freeze`: which parameters --freeze and --train_only mean
strategy_rules  `Sharding`, `strategy`: which strategies go with which flags, without torch
strategy        `make_fabric`, `wrap`: FSDP, FSDP2, DDP, one device, TPU; nothing else knows about sharding
capabilities    `chunks_its_loss`, `find_leak`: fast paths and packed documents that a model can take, measured
gate            `verify`: is the wrapped model the one that transformers loads, with its loss and gradients?
flops           `of_model`, `peak_tflops`: operations of a step, and what a device can do
sampling        `generate`, `self_replay`: text from a finished model, to look at and to be replayed
"""
