"""Machines whose disk isn't that of rank 0. In a save their ranks send rank 0 what they would
write, so that a checkpoint is whole in one place, and has one commit point."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fabric_llm.base import ranks
from fabric_llm.base.faults import Fault, as_fault
from fabric_llm.base.files import writable
from fabric_llm.base.program import wait_until

# A file of a new name is seen at once on a disk that machines share: nothing of it was cached.
SECONDS_TO_SEE = 5.0


@dataclass(frozen=True)
class Apart:
    """The ranks that don't see what rank 0 writes."""

    ranks: tuple[int, ...]
    rank: int  # this one
    # gloo, of all ranks. Only saves use it: they may run beside training.
    group: ProcessGroup

    @property
    def is_here(self) -> bool:
        """Whether this rank is one of them."""
        return self.rank in self.ranks


class File(NamedTuple):
    """What a rank writes into a file of a checkpoint."""

    name: str
    layout: dict[str, Tensor]  # where they are only announced, tensors without memory
    metadata: dict[str, str]


def find(directory: Path, timeout_seconds: float) -> Optional[Apart]:
    """The ranks that don't see rank 0's run directory, None where all do. All ranks call it.

    timeout_seconds: for what is sent in a save. Raises Fault (73) where one can't write on its
    machine.
    """
    # A name that is swept, should a kill leave it.
    path = directory / ranks.from_first(f".tmp-step-{secrets.token_hex(8)}")
    ranks.from_rank_zero(path.touch)
    seen = ranks.gather(wait_until(path.exists, SECONDS_TO_SEE))
    ranks.from_rank_zero(path.unlink)
    if all(seen):
        return None
    ranks.first_fault(_problem_here(directory))
    blind = tuple(rank for rank, sees in enumerate(seen) if not sees)
    rank, timeout = torch.distributed.get_rank(), timedelta(seconds=timeout_seconds)
    group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    if rank == 0:
        numbers = ", ".join(map(str, blind))
        print(
            f"{str(directory)!r} isn't seen by ranks {numbers}, which send rank 0 what they save."
        )
    return Apart(blind, rank, group)


def _problem_here(directory: Path) -> Optional[Fault]:
    """Why there can't be a STATUS.json, or a copy, in the directory on this machine."""
    try:
        writable(directory / "x", f"on {gethostname()}: {str(directory)!r} can't be written")
        directory.mkdir(parents=True, exist_ok=True)
    except (Fault, OSError) as error:
        return as_fault(error)
    return None


def send(apart: Apart, files: Callable[[], Sequence[File]]) -> None:
    """Send rank 0 what this rank would write. Raises what `files` raises, or the copy of a tensor
    to the host: then rank 0 hears that nothing follows."""

    def say(word: Union[File, str, None]) -> None:
        torch.distributed.send_object_list([word], dst=0, group=apart.group)

    try:
        # What the file will hold is announced first, as shapes and dtypes. Its tensors follow one
        # by one, so that rank 0 never holds more than one of them.
        for file in files():
            announced = {}
            for name, tensor in file.layout.items():
                announced[name] = torch.empty_like(tensor, device="meta")
            say(file._replace(layout=announced))
            for name, tensor in file.layout.items():
                content = _bytes_of(tensor.cpu())
                say(name)
                torch.distributed.send(content, dst=0, group=apart.group)
    finally:
        say(None)


def receive(apart: Apart, sender: int) -> Iterator[tuple[File, str, Tensor]]:
    """(file, name, tensor), on rank 0, of all that the rank `sender` sends, one tensor at a
    time."""
    heard: list[Any] = [None]
    while True:
        # A File announces what follows, a name the tensor that comes next, and None the end.
        torch.distributed.recv_object_list(heard, src=sender, group=apart.group)
        [word] = heard
        if word is None:
            return
        if isinstance(word, File):
            file = word
            continue
        expected = file.layout[word]
        tensor = torch.empty(expected.shape, dtype=expected.dtype)
        torch.distributed.recv(_bytes_of(tensor), src=sender, group=apart.group)
        yield file, word, tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
