"""Parameter groups, the learning rate as a function of the step, gradients and updates by number. AdamW: adamw.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: matrices, not norms and biases.

    Ask the model before it is wrapped: FSDP shows each parameter as a one-dimensional piece.
    """
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], decayed: set[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for AdamW, with and without weight decay. Names are those of the unwrapped model."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[name in decayed].append(parameter)
    settings = ((groups[True], weight_decay), (groups[False], 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in settings if parameters]
