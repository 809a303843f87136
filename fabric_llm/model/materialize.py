"""Memory and values for a model on the meta device, one module at a time: no device holds an unsharded model."""

from __future__ import annotations

from collections import Counter
from typing import Optional

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar  # noqa: F401

from fabric_llm.model.language_model import LanguageModel


class Materializer:
    """Gives modules on the meta device memory and the reference's values, the same on all ranks.

    Every rank calls it for the same modules in the same order. `reference` is needed on rank 0 only.
    """

    def __init__(self, model: LanguageModel, reference: Optional[PreTrainedModel], device: torch.device) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.device = device
        self.reference = None if reference is None else dict(LanguageModel(reference).named_modules())
        counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self.tied_ids = {key for key, count in counts.items() if count > 1}
        self.tied: dict[int, nn.Parameter] = {}

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters and buffers that `module` itself holds, not those of its children."""
        for name, meta in module._parameters.items():
            if meta is None or not meta.is_meta:
                continue
            parameter = self.tied.get(id(meta))
            if parameter is None:
                value = self._value(module, name, meta.dtype)
                parameter = nn.Parameter(value, requires_grad=meta.requires_grad)
                if id(meta) in self.tied_ids:
                    self.tied[id(meta)] = parameter
            module._parameters[name] = parameter
        for name, meta in module._buffers.items():
            if meta is not None and meta.is_meta:  # in the reference's dtype: RoPE's frequencies stay float32
                module._buffers[name] = self._value(module, name, dtype=None)

    def _value(self, module: nn.Module, name: str, dtype: Optional[torch.dtype]) -> Tensor:
        """The tensor `name` of `module`, sent from rank 0 to all, on the device."""
        distributed = torch.distributed.is_initialized()
        value = None
        if self.reference is not None:
            value = getattr(self.reference[self.names[module]], name).detach().to(device=self.device, dtype=dtype)
        if distributed and torch.distributed.get_world_size() > 1:
            if dtype is None:  # a buffer: the skeleton doesn't know the dtype that the reference gives it
                found = [None if value is None else (value.dtype, tuple(value.shape))]
                torch.distributed.broadcast_object_list(found, src=0, device=self.device)
                dtype, shape = found[0]
            else:
                shape = tuple(getattr(module, name).shape)
            if value is None:
                value = torch.empty(shape, dtype=dtype, device=self.device)
            value = value.contiguous()
            torch.distributed.broadcast(value, src=0)
        return value
