"""Whole weights for a checkpoint of state_dict_type full: they come to rank 0 one unit at a time,
and model/saving.py writes them as they come."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from fabric_llm.base.faults import one_line
from fabric_llm.base.ranks import waits_for_others
from fabric_llm.checkpoint.state_dicts import saved_shapes
from fabric_llm.model import loading, saving, sharded
from fabric_llm.model.sharded import original_name
from fabric_llm.model.weights import PREFIX, saved, units


class Piece(NamedTuple):
    """What this rank has of a weight."""

    tensor: Tensor  # flattened
    # Elements that each rank of its group has, in their order; None where each has all of it.
    counts: Optional[list[int]]


class Pieces:
    """What this rank has of each weight, to send it to rank 0, which writes the weights whole."""

    def __init__(self, model: nn.Module, skeleton: PreTrainedModel) -> None:
        """model: wrapped. All ranks call it."""
        self.skeleton, self.group = skeleton, sharded.shard_group(model)
        held = {
            name: (sharded.local_part(shard.parameter), shard.counts)
            for name, shard in sharded.shards(model).items()
        }
        # Buffers aren't sharded: each rank has all of them.
        held |= {original_name(name): (buffer, None) for name, buffer in model.named_buffers()}
        self.held: dict[str, Piece] = {}
        # Another group of ranks has the same weights: the one with rank 0 sends them.
        if 0 in sharded.shard_ranks(model):
            for name in saved(skeleton):
                tensor, counts = held[PREFIX + name]
                self.held[name] = Piece(tensor.detach().flatten(), counts)

    def of_units(self, group: Optional[ProcessGroup]) -> Iterator[dict[str, Tensor]]:
        """The whole weights of one unit after the other, on rank 0. All ranks call it.

        group: a process group of the same ranks to use in place of the model's own, as that of
        writing.Background; None: the model's own.
        """
        # Ranks of other replicas have nothing to send.
        if not self.held:
            return
        expected = self.skeleton.state_dict()
        # Rank 0 holds one whole unit at a time.
        for names in units(self.skeleton).values():
            weights = {}
            for name in names:
                weight = self._sent(name, group or self.group)
                if weight is not None:
                    weights[name] = weight.view(expected[name].shape)
            yield weights

    def _sent(self, name: str, group: Optional[ProcessGroup]) -> Optional[Tensor]:
        """The pieces of all ranks together, flattened, on rank 0, which is the first in its
        group."""
        piece, counts = self.held[name]
        # The rank has all of it. Other ranks than 0 return it as well, and their caller drops it.
        if self.group is None or counts is None:
            return piece
        # gloo sends from the CPU, NCCL from the GPU.
        piece = piece.to(sharded.communication_device(group))
        is_first = torch.distributed.get_rank(group) == 0
        # A gather of pieces of unequal size, which torch's own gather doesn't take: each rank sends
        # its piece to the first rank only, which alone receives.
        nothing = [0] * len(counts)
        to_first = [len(piece), *nothing[1:]]
        received = counts if is_first else nothing
        weight = piece.new_empty(sum(received))
        waits_for_others()
        torch.distributed.all_to_all_single(weight, piece, received, to_first, group=group)
        return weight if is_first else None


def require_opens(skeleton: PreTrainedModel) -> None:
    """Raises ValueError unless the configuration that would be saved makes this model again."""
    problem = None
    with TemporaryDirectory() as folder:
        saving.write_config(Path(folder), skeleton)
        # Open it as a resumed run or an export would.
        try:
            again = loading.build_skeleton(loading.load_config(folder), skeleton.dtype)
            if saved_shapes(again) != saved_shapes(skeleton):
                problem = f"makes another model, {type(again).__name__}"
        except Exception as error:  # whatever transformers makes of it
            # The user can't look into the temporary folder, so its name isn't shown.
            problem = f"makes no model ({one_line(error).replace(folder, 'it')[:200].rstrip('.')})"
    if problem is not None:
        raise ValueError(
            f"{type(skeleton).__name__} could be trained and saved, but not resumed or exported: "
            f"of the configuration that is saved with it ({skeleton.config.model_type!r}), "
            f"AutoModelForCausalLM {problem}. Take a model of text alone."
        )
