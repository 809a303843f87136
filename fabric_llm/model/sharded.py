"""What a rank holds of a wrapped model: its part of each parameter, and how that is filled.

Everything that reads, writes or sums over a sharded model asks here. strategy.py makes one, and is
needed only where a model trains.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.ranks import alone, from_rank_zero, waits_for_others
from fabric_llm.model.weights import PREFIX, Source, units


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


@torch.no_grad()
def fill(model: nn.Module, skeleton: PreTrainedModel, source: Optional[Source] = None) -> None:
    """Give every rank its part of the weights of `source`, which rank 0 has; it is None on the
    others. All ranks call it.

    model: a LanguageModel on the devices, wrapped or not. skeleton: the unwrapped model on the meta
    device. A rank holds one whole parameter beside its parts, rank 0 one unit. Raises what reading
    raises, on all ranks.
    """
    # What this rank holds, and where that begins in the flattened whole.
    held = {
        name: (local_part(shard.parameter), shard.first) for name, shard in shards(model).items()
    }
    held |= {original_name(name): (buffer, 0) for name, buffer in model.named_buffers()}
    expected, device = skeleton.state_dict(), communication_device()
    for unit, names in units(skeleton).items():
        failpoint("fill")
        # Rank 0 reads a unit and sends it whole, and each rank keeps its part.
        tensors: dict[str, Tensor] = {}  # on rank 0
        # An error of rank 0 is raised on all ranks, which would otherwise wait for its message.
        from_rank_zero(lambda: tensors.update(source.read(unit)))
        for name in names:
            own, first = held[PREFIX + name]
            if tensors:
                # Taken out, so that the unit's memory gets smaller as it is sent.
                whole = tensors.pop(name).contiguous()
            else:
                whole = torch.empty_like(expected[name], device=device)
            if not alone():
                whole = whole.to(device)
                waits_for_others()
                torch.distributed.broadcast(whole, src=0)
            # FSDP splits the flattened parameter, so a rank's part is a range of its elements.
            own.view(-1).copy_(whole.view(-1)[first : first + own.numel()])


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
