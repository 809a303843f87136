"""What a rank holds of a model, wrapped or not: repeated layers, and its part of each parameter.

Everything that reads, writes or sums over a sharded model asks here. strategy.py makes one, and is
needed only where a model trains.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor

from fabric_llm.base.ranks import alone, waits_for_others

PREFIX = "causal_lm."  # of names in a LanguageModel, before those that transformers knows


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder layers of a model by name, none of them inside another: of the classes that it
    names itself, else of its longest list."""
    # `_no_split_modules` are the classes that transformers keeps on one device: decoder layers.
    kinds = set()
    for module in model.modules():
        kinds.update(getattr(module, "_no_split_modules", None) or ())
    # The names may be missing, or be those of classes that this model doesn't use.
    if not any(type(module).__name__ in kinds for module in model.modules()):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        kinds = {type(layer).__name__ for layer in max(lists, key=len, default=())}
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # `named_modules` yields outer modules before those in them.
        is_inside = any(name.startswith(f"{outer}.") for outer in layers)
        if type(module).__name__ in kinds and not is_inside:
            layers[name] = module
    return layers


def replacing(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A function that replaces the parameters on the meta device that a module itself holds, by
    parameters with the tensors that `make` makes of them."""
    # By the id of the one on the meta device: a tied one is found there again. Weak, so that what a
    # strategy has sharded isn't kept whole.
    there: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()

    def replace_parameters(module: nn.Module) -> None:
        for key, meta in module._parameters.items():
            if meta is not None and meta.is_meta:
                # A tied parameter that was replaced before, in another module, is taken again.
                parameter = there.get(id(meta))
                if parameter is None:
                    there[id(meta)] = parameter = nn.Parameter(
                        make(meta), requires_grad=meta.requires_grad
                    )
                module._parameters[key] = parameter

    return replace_parameters


def shard_group(model: nn.Module) -> Optional[ProcessGroup]:
    """The process group that the parameters of a wrapped model are split over, None where ranks
    hold them whole."""
    root = next((m for m in model.modules() if isinstance(m, FSDP)), None)
    if root is not None and root.sharding_strategy != fsdp.ShardingStrategy.NO_SHARD:
        return root.process_group
    # FSDP2 shards all parameters over the same mesh, so that the first one speaks for all.
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.get_group("shard")
    return None


def shard_ranks(model: nn.Module) -> list[int]:
    """The ranks that together hold the parameters of a wrapped model once: this rank alone where
    each holds them whole."""
    if (group := shard_group(model)) is not None:
        return torch.distributed.get_process_group_ranks(group)
    return [0 if alone() else torch.distributed.get_rank()]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Shard(NamedTuple):
    """A parameter, and where the part of it that this rank holds lies in the whole, flattened."""

    parameter: nn.Parameter
    first: int  # index of this rank's first element
    counts: list[int]  # elements that each rank of the `shard_group` holds, in their order


def shards(model: nn.Module) -> dict[str, Shard]:
    """The parameters of a wrapped model, by the names that they have in the unwrapped one. All
    ranks call it.

    Both FSDPs split in the order of ranks, FSDP2 between rows: what comes before is what lower
    ranks hold, and no field of theirs is read.
    """
    named = {original_name(name): parameter for name, parameter in model.named_parameters()}
    group, rank = shard_group(model), 0
    # int64 [parameters, ranks of the group]: how many elements each rank holds.
    counts = torch.tensor([[local_part(parameter).numel()] for parameter in named.values()])
    if group is not None:
        # One message for all parameters, not one for each.
        rank, held = torch.distributed.get_rank(group), counts.to(communication_device(group))
        of_ranks = [torch.empty_like(held) for _ in range(torch.distributed.get_world_size(group))]
        waits_for_others()
        torch.distributed.all_gather(of_ranks, held, group=group)
        counts = torch.cat(of_ranks, dim=1)
    # What lower ranks hold of a parameter is where this rank's part begins.
    return {
        name: Shard(parameter, sum(held[:rank]), held)
        for (name, parameter), held in zip(named.items(), counts.tolist())
    }


def sum_over_shards(numbers: Tensor, group: Optional[ProcessGroup]) -> Tensor:
    """The sum of what all ranks of a `shard_group` have measured on their parts, on the device of
    `numbers`."""
    if group is None:
        return numbers
    # Offloaded gradients are on the CPU, where NCCL can't sum them.
    total = numbers.to(communication_device(group))
    torch.distributed.all_reduce(total, group=group)
    return total.to(numbers.device)


def fingerprint(model: nn.Module) -> int:
    """A number that tells the weights of a wrapped model: the sum of their bits as integers, the
    same however ranks share them. All ranks call it."""
    total = torch.zeros(1, dtype=torch.int64)
    for parameter in model.parameters():
        part = local_part(parameter.detach()).contiguous()
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
        total += part.view(integers).sum(dtype=torch.int64).cpu()
    return int(sum_over_shards(total, shard_group(model)))


def communication_device(group: Optional[ProcessGroup] = None) -> str:
    """Where the tensors are that ranks of a group send to each other; without ranks the CPU."""
    is_nccl = torch.distributed.is_initialized() and torch.distributed.get_backend(group) == "nccl"
    return "cuda" if is_nccl else "cpu"


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward fsdp and fsdp2 leave the outermost unit whole: split
    it again.

    Whoever makes such a pass calls this: `model.parameters()` of fsdp2 are others while a unit is
    whole, and the next pass of fsdp would take the whole unit that is there, also where its weights
    have changed since. After a backward pass fsdp forgets the units that are neither split nor
    trained, whose tensors aren't parameters any more until it is told.
    """
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
        if not isinstance(module, FSDP) or module._handle is None or module._is_root is None:
            continue  # it has never run, or holds nothing
        handle = module._handle
        splits = handle.uses_sharded_strategy
        if not handle.needs_unshard() and (splits or not handle.flat_param.requires_grad):
            _reshard(module, handle, splits)


WRAPPERS = ("_forward_module", "_fsdp_wrapped_module", "_orig_mod", "module")


def original_name(name: str) -> str:
    """A parameter's name in the unwrapped model."""
    # Each wrapper, and torch.compile, adds its own word to the path of a module.
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
