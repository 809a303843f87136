"""A causal language model from transformers: loaded unit by unit, sharded over the devices, and
equal to the reference.

folders         `check_model_folder`: what a model's folder may hold and declare, before torch is
                imported
tokenizer_file  `check_tokenizer_file`: what a tokenizer.json may declare
tokenizer       `load_tokenizer`, `save_tokenizer`: as transformers 4 and 5 read it; `identity`
loading         `load_config`, `build_skeleton`, `open_weights`: what a model's files say of it
tensor_files    `Tensors`, `TensorFile`: safetensors files, whole or in parts, read and written one
                tensor at a time
weights         `Stored`, `Drawn`, `repeated_layers`: weights from files or random numbers, unit by
                unit
saving          `write_configuration`, `WeightFiles`: a model's folder, as old and new transformers
                read it
reference       `load_reference`: the model as transformers has it, on one CPU, in the memory that
                there is
language_model  `LanguageModel`, `token_loss`: the model that returns its loss, and the auxiliary
                loss of its routers
chunked_loss    `Head`, `chunked_loss`: the loss without the logits of the whole batch
attention       `resolve_attention`: what --attention means for a model, on a device
packed_attention
                `packed_attention`: attention of packed documents, without a mask
context_parallel
                `share_rows`: attention of ranks that have a part of each row
layers          `checkpoint_activations`, `compile_layers`: what is done to each of the repeated
                layers
float8          `float8_products`: products of layers in 8 bits
offload         `offloading`: the inputs of recomputed layers, in the memory of the host
tiles           `found_in`, `tile`: MLPs and norms that take a row's tokens a part at a time
positions       `scaled`: a configuration with the rotary positions of --rope
freezing        `frozen_names`, `freeze`: which parameters --freeze and --train_only mean
strategy_rules  `Placement`, `strategy`: the devices of a run, and which strategies go with which
                flags, without torch
strategy        `make_fabric`, `wrap`: FSDP, FSDP2, DDP, one device, TPU; nothing else knows about
                sharding
sharded         `shards`, `fill`, `local_part`: what a rank holds of a wrapped model
gate            `outputs_of`, `gradients_of_wrapped`: is it the model that transformers loads?
capabilities    `takes_packed_attention`, `find_leak`: which fast paths can it take, and does it
                keep documents apart?
flops           `of_model`, `peak_tflops`: operations of a step, and what a device can do
"""
