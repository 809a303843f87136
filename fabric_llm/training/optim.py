"""The optimizer of a run, and which parameters decay. Another optimizer goes into `make_optimizer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fabric_llm.base.command_line import Flags
from fabric_llm.model import strategy
from fabric_llm.training.adamw import AdamW
from fabric_llm.training.adamw_rounded import Origin


def make_optimizer(wrapped: nn.Module, decayed: set[str], training: Flags, updates: str) -> torch.optim.Optimizer:
    """The optimizer for a wrapped model. Its state must be tensors, so that checkpoints can hold it.

    decayed: names of parameters, see `decayed_names`. training: the flags of that group. updates: how bfloat16 parameters are
    rounded, see adamw.py.
    """
    named = {strategy.original_name(name): parameter for name, parameter in wrapped.module.named_parameters()}
    groups = parameter_groups(named.items(), decayed, training.weight_decay)
    places = strategy.shard_places(list(named.values()), strategy.shard_group(wrapped))
    origins = {parameter: Origin(name, offset) for (name, parameter), (offset, _) in zip(named.items(), places)}
    betas = (training.beta1, training.beta2)
    optimizer = AdamW(groups, lr=training.lr, betas=betas, updates=updates, seed=training.seed, origins=origins)
    optimizer.initialise()
    return optimizer


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: matrices, not norms and biases.

    Ask the model before it is wrapped: FSDP shows each parameter as a one-dimensional piece.
    """
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], decayed: set[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for an optimizer, with and without weight decay. Names are those of the unwrapped model."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[name in decayed].append(parameter)
    settings = ((groups[True], weight_decay), (groups[False], 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in settings if parameters]
