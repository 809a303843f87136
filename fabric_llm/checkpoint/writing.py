"""Write a checkpoint. reading.py reads it again, and keep.py has the checkpoints of a run.

    checkpoints/RUN/step-00000100/
        MANIFEST.json            bytes and sha256 of every other file, written last
        config.json, model.safetensors, tokenizer...   state_dict_type full: opens with from_pretrained
        weights/                 state_dict_type sharded: each rank's part of the weights
        trainer/progress.json    step, position and what must be the same on resume
        trainer/optimizer/       optimizer state, each rank's part
        trainer/probe.safetensors  logits of the model in training on a fixed batch, for export_hf.py

Everything is JSON or safetensors: reading it runs no code. Parts are written by torch.distributed.checkpoint with
the offsets of each part in its file, so that any number of ranks, and one process without any, can read them.

A save has three acts. `begin` takes the tensors from the model; `write` puts them into `.tmp-*` beside the target, each
rank its own files, durable and hashed; `commit` gathers what all ranks say, and rank 0 writes the manifest and renames.
The rename is the one commit point. A failure on any rank is raised on all of them, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from transformers import PreTrainedModel

from fabric_llm.base import files
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import NON_FINITE, OUT_OF_MEMORY, PEER_LOST, SAVE_FAILED, STOPPED, Fault, as_fault, one_line
from fabric_llm.base.files import MANIFEST, fsync
from fabric_llm.base.ranks import alone, from_first, gather
from fabric_llm.checkpoint.progress import Progress, versions
from fabric_llm.checkpoint.state_dicts import (
    full_weights,
    is_finite,
    optimizer_parts,
    own_bytes,
    quiet,
    weight_parts,
)
from fabric_llm.checkpoint.tensors import first_failure
from fabric_llm.model.strategy import reshard

MANY_ELEMENTS = 2**24  # of all ranks together


@dataclass
class Pending:
    """A checkpoint on its way."""

    target: Path  # step-N
    temporary: Path  # .tmp-step-N-*
    rank: int
    parts: dict[str, dict[str, Any]]  # folder -> tensors of which each rank writes its parts
    rest: Callable[[Path], None]  # writes all other files, on rank 0
    document: dict[str, Any]  # the manifest, but for the files
    entries: dict[str, files.Entry]  # of this rank's files, once they are written
    problem: Optional[Fault] = None  # why they are not


def begin(
    target: Path,
    fabric: Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    skeleton: PreTrainedModel,
    tokenizer: Optional[Any],
    progress: Progress,
    facts: dict[str, Any],
    origin: dict[str, Any],
    probe: dict[str, Tensor],
    state_dict_type: str,
    copy: bool = False,
) -> Pending:
    """First act, on all ranks: take the tensors, check the room, make the temporary directory.

    model: the wrapped model without Fabric's own wrapper. skeleton: the unwrapped model on the meta device, for its
    config and names. facts: what a resumed run must have in common with this one. origin: hashes of what the run was
    made from, for the manifest. probe: see `record_probe`. copy: so that training can go on before `commit`.
    Raises Fault (74) on all ranks: `target` exists (nothing is ever overwritten), no room, not writable.
    """
    reshard(model)
    rank = fabric.global_rank
    parts = {"trainer/optimizer": optimizer_parts(model, optimizer)}
    weights: Optional[dict[str, Tensor]] = None
    if state_dict_type == "full":
        weights = full_weights(model, skeleton, offload=fabric.device.type != "cpu")
    else:
        parts["weights"] = weight_parts(model, skeleton)
    own = [*parts.values(), {**(weights or {}), **probe} if rank == 0 else {}]
    bad = next((name for some in own for name, tensor in some.items() if not is_finite(tensor)), None)
    if found := [name for name in gather(bad) if name is not None]:
        raise Fault(f"{target} isn't saved: {found[0]} holds NaN or infinity.", NON_FINITE)
    needed_bytes = sum(gather(sum(own_bytes(t, rank) for some in own for t in some.values())))
    if copy:
        with quiet():
            parts = {folder: BlockingAsyncStager().stage(tensors) for folder, tensors in parts.items()}
            if weights is not None:
                weights = BlockingAsyncStager().stage(weights) if rank == 0 else {}

    kept = {
        name.rpartition(".")[2]  # such as exp_avg
        for name, tensor in parts["trainer/optimizer"].items()
        if isinstance(tensor, Tensor) and tensor.ndim
    }
    said = {"progress": asdict(progress), "state_dict_type": state_dict_type, "optimizer_state": sorted(kept), **facts}
    rest = partial(_write_rest, skeleton=skeleton, weights=weights, tokenizer=tokenizer, probe=probe, said=said)
    temporary = Path(from_first(str(target.with_name(f".tmp-{target.name}-{secrets.token_hex(4)}"))))
    document = {"step": progress.step, "world_size": fabric.world_size, "versions": versions(), **origin}
    pending = Pending(target, temporary, rank, parts, rest, document, {})

    def make_room() -> None:
        failpoint("save.begin")
        if target.exists():
            raise FileExistsError(f"{target} exists already")
        target.parent.mkdir(parents=True, exist_ok=True)
        require_room(target.parent, needed_bytes, f"Checkpoint {target.name}")
        for folder in parts:
            (temporary / folder).mkdir(parents=True)

    _agree(pending, gather(_try(make_room) if rank == 0 else None))
    return pending


def _write_rest(
    folder: Path,
    skeleton: PreTrainedModel,
    weights: Optional[dict[str, Tensor]],
    tokenizer: Optional[Any],
    probe: dict[str, Tensor],
    said: dict[str, Any],
) -> None:
    """Everything that is nobody's part: config, tokenizer, probe, progress, and whole weights if there are some."""
    if weights is not None:
        skeleton.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    else:
        skeleton.config.save_pretrained(folder)
        if (generation_config := getattr(skeleton, "generation_config", None)) is not None:
            generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    save_file(probe, folder / "trainer" / "probe.safetensors")
    (folder / "trainer" / "progress.json").write_text(json.dumps(said, indent=2) + "\n")


def write(pending: Pending, group: Optional[ProcessGroup] = None) -> None:
    """Second act, on all ranks; after `begin(copy=True)` in a thread, with a process group of its own.

    Never raises: `pending.problem` says what went wrong. Whatever a rank's own files give, it takes part in what all
    ranks do together, which fails on all alike: so none waits for one that gave up. Each file is hashed and made durable
    while the next one is written.
    """
    with files.Describing(pending.temporary) as describing:

        def rest() -> None:
            if pending.rank == 0:
                pending.rest(pending.temporary)
            failpoint("save.rest")
            if pending.rank == 0:  # the other ranks may be writing their parts already
                there = files.files_in(pending.temporary)
                describing.start(name for name in there if str(Path(name).parent) not in pending.parts)

        def together(folder: str, tensors: dict[str, Any]) -> None:
            with quiet():
                writer = _writer(pending.temporary / folder, tensors)
                writer.fs = _Files(lambda path: describing.start([str(path.relative_to(pending.temporary))]))
                dcp.save(tensors, storage_writer=writer, process_group=group)

        def described() -> None:
            pending.entries = describing.entries()
            failpoint("save.hash")

        problems = [_try(rest)]
        for folder, tensors in pending.parts.items():  # each of them, as the others do, whatever went wrong here
            problems += [_try(partial(together, folder, tensors)), _try(partial(failpoint, "save.parts"))]
        problems.append(_try(described))
        pending.problem = next((problem for problem in problems if problem is not None), None)


def _writer(folder: Path, tensors: dict[str, Any]) -> HuggingFaceStorageWriter:
    """Each rank's parts in one file, or, where there is much, in several of about the same size, for `write`."""
    sizes = {name: tensor.numel() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if sum(sizes.values()) < MANY_ELEMENTS:
        return HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    filled, file_of = [0] * files.THREADS, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        file = filled.index(min(filled))
        filled[file] += sizes[name]
        file_of[name] = file + 1
    return HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=file_of, save_distributed=True)


class _Files(FileSystem):
    """Where a writer puts its files: `written` is called with each as soon as it is complete."""

    def __init__(self, written: Callable[[Path], None]) -> None:
        super().__init__()
        self.written = written

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield stream
        self.written(Path(path))


def commit(pending: Pending, before: Callable[[], None] = lambda: None) -> None:
    """Third act, on all ranks: publish what all have written, on rank 0 after `before()`.

    Raises Fault (74) on all ranks, see `write`.
    """
    answers = gather((pending.entries, pending.problem))
    _agree(pending, [problem for _, problem in answers])
    written = {name: entry for entries, _ in answers for name, entry in entries.items()}
    document = {**pending.document, "files": dict(sorted(written.items()))}

    def seal() -> None:
        for rank, (entries, _) in enumerate(answers):
            _require_seen(pending, rank, entries)
        before()
        publish(pending.temporary, pending.target, document)

    _agree(pending, gather(_try(seal) if pending.rank == 0 else None))


def _require_seen(pending: Pending, rank: int, entries: dict[str, files.Entry]) -> None:
    """Raises Fault (74) unless the files that `rank` has written are here: another machine may have written them elsewhere."""
    for name, entry in entries.items():
        path, size = pending.temporary / name, None
        with suppress(FileNotFoundError), path.open("rb") as file:  # NFS asks its server when a file is opened
            size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise Fault(
                f"{pending.target} isn't saved: rank 0 doesn't see {name} as rank {rank} has written it; "
                f"{str(pending.target.parent)!r} must be on a disk that all machines share.",
                SAVE_FAILED,
                retryable=False,
            )


class Background:
    """Writes checkpoints while training goes on, one at a time, with a process group of its own. All ranks make one."""

    def __init__(self) -> None:
        self.group = None if alone() else torch.distributed.new_group(backend="gloo")
        self.pool = ThreadPoolExecutor(1, "checkpoint")

    def write(self, pending: Pending) -> Future[Pending]:
        """The second act of a save whose first was `begin(copy=True)`; the result is for `commit`."""

        def written() -> Pending:
            write(pending, self.group)
            return pending

        return self.pool.submit(written)


def publish(temporary: Path, target: Path, document: dict[str, Any]) -> None:
    """Give a complete directory, whose files are durable, its manifest and its name: the one commit point."""
    failpoint("publish.begin")
    (temporary / MANIFEST).write_bytes(files.encode(document))
    failpoint("publish.manifest")
    for path in [temporary / MANIFEST, *(d for d in temporary.rglob("*") if d.is_dir()), temporary]:
        fsync(path)
    failpoint("publish.before_rename")
    temporary.rename(target)
    failpoint("publish.renamed")
    fsync(target.parent)
    failpoint("publish.done")


def require_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises Fault (74) unless the disk that holds `folder` has `needed_bytes` and a little more."""
    files.room(folder, needed_bytes, what, "make room, or keep fewer checkpoints (--keep_last)")


def _try(action: Callable[[], None]) -> Optional[Fault]:
    """What went wrong, for `_agree`; None if nothing."""
    try:
        action()
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        first = first_failure(error)
        if isinstance(first, Fault) or as_fault(first).code in (PEER_LOST, OUT_OF_MEMORY, STOPPED):
            return as_fault(first)
        return Fault(one_line(first) or type(first).__name__, SAVE_FAILED)
    return None


def _agree(pending: Pending, problems: Sequence[Optional[Fault]]) -> None:
    """Raise the first rank's problem on all ranks, if there is any, and remove what was written."""
    found = next(((rank, problem) for rank, problem in enumerate(problems) if problem is not None), None)
    if found is None:
        return
    if pending.rank == 0:
        shutil.rmtree(pending.temporary, ignore_errors=True)
    rank, problem = found
    if problem.code != SAVE_FAILED or not problem.retryable:
        raise problem
    raise Fault(f"{pending.target} couldn't be saved, rank {rank}: {problem}", SAVE_FAILED)


def record_probe(model: nn.Module, input_ids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What the model in training makes of a fixed batch, for export_hf.py to compare with.

    input_ids: int64 [1, context]. Returns input_ids, positions int64 [up to 16] and logits float32
    [positions, vocabulary]. All ranks call it.
    """
    positions = torch.linspace(0, input_ids.shape[1] - 1, min(16, input_ids.shape[1])).long()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids.to(device))
    model.train()
    return {"input_ids": input_ids, "positions": positions, "logits": logits[0, positions].float().cpu().contiguous()}
