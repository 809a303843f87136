"""Write a checkpoint. reading.py reads it again, and retention.py removes it.

    checkpoints/RUN/step-00000100/
        MANIFEST.json            bytes and sha256 of every other file, written last
        config.json, model.safetensors, tokenizer...
                                 state_dict_type full: opens with from_pretrained
        weights/                 state_dict_type sharded: each rank's part of the weights
        trainer/progress.json    step, position and what must be the same on resume
        trainer/optimizer/       optimizer state, each rank's part
        trainer/probe.safetensors
                                 logits of the model in training on a fixed batch, for export_hf.py

Everything is JSON or safetensors: reading it runs no code. Parts have their offsets in their files,
so that any number of ranks, and one process without any, can read them.

A save has three acts. `begin` takes the tensors from the model; `write` puts them into `.tmp-*`
beside the target, each rank its own files, durable and hashed; `commit` gathers what all ranks say,
and rank 0 writes the manifest and renames. The rename is the one commit point. A failure on any
rank is raised on all of them, and leaves nothing behind.
"""

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import _hf_utils as dcp
from transformers import PreTrainedModel

from fabric_llm.base import files
from fabric_llm.base.describing import Describing
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import (
    NON_FINITE,
    OUT_OF_MEMORY,
    PEER_LOST,
    SAVE_FAILED,
    STOPPED,
    Fault,
    as_fault,
    one_line,
)
from fabric_llm.base.files import MANIFEST, fsync
from fabric_llm.base.machine import free_memory_bytes
from fabric_llm.base.ranks import alone, from_first, gather
from fabric_llm.checkpoint import apart, whole
from fabric_llm.checkpoint.keep import Progress, versions
from fabric_llm.checkpoint.state_dicts import (
    Part,
    class_of,
    optimizer_held,
    own_parts,
    weights_held,
)
from fabric_llm.model import saving
from fabric_llm.model.sharded import reshard, shard_ranks
from fabric_llm.model.tensor_files import TensorFile
from fabric_llm.model.weights import is_finite

# From so many bytes on a rank writes several files: one is hashed while the next one is written.
MANY_BYTES = 2**25


@dataclass
class Pending:
    """A checkpoint on its way."""

    target: Path  # step-N
    progress: Progress
    temporary: Path  # .tmp-step-N-*
    rank: int
    parts: dict[str, list[tuple[str, Part]]]  # folder -> what this rank writes there, by name
    pieces: Optional[whole.Pieces]  # of the weights that rank 0 writes whole
    skeleton: PreTrainedModel
    tokenizer: Optional[Any]
    probe: dict[str, Tensor]
    document: dict[str, Any]  # progress.json
    manifest: dict[str, Any]  # but for the files
    # (bytes of the copies that let training go on meanwhile, bytes of free memory), both of the
    # host that would have the least left. None: no copies are asked for.
    copies: Optional[tuple[int, float]] = None
    ranks_apart: Optional[apart.Apart] = None  # those that don't see rank 0's disk
    # Of the files that this rank has written.
    entries: dict[str, files.Entry] = field(default_factory=dict)
    problem: Optional[Fault] = None  # why this rank couldn't write them all

    @property
    def is_copied(self) -> bool:
        """Whether training can go on before it is published: not where a host has no memory for the
        copies."""
        return self.copies is not None and self.copies[0] <= self.copies[1]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that this rank writes, or sends to rank 0."""
        for parts in self.parts.values():
            for name, part in parts:
                yield name, part.tensor
        if self.pieces is not None:
            for name, piece in self.pieces.held.items():
                yield name, piece.tensor
        if self.rank == 0:
            yield from self.probe.items()


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
    ranks_apart: Optional[apart.Apart] = None,
) -> Pending:
    """First act, on all ranks: take the tensors, check the room, make the temporary directory.

    model: without Fabric's wrapper. skeleton: unwrapped, on the meta device. facts: what a resumed
    run must have in common with this one. origin: hashes of what the run was made from. probe: see
    `record_probe`. copy: to host memory, where there is room, so that training can go on before
    `commit`. ranks_apart: those that don't see rank 0's disk. Raises Fault on all ranks: 74 where
    `target` exists, has no room, or isn't writable, 76 where a tensor holds NaN or infinity.
    """
    # The forward pass of the probe has left the outermost unit whole. Its shards are saved.
    reshard(model)
    state = optimizer_held(model, skeleton, optimizer)
    # The optimizer's state is always saved in parts, since `from_pretrained` doesn't read it.
    parts = {"trainer/optimizer": own_parts(model, state)}
    pieces = None
    if state_dict_type == "full":
        pieces = whole.Pieces(model, skeleton)
    else:
        parts["weights"] = own_parts(model, weights_held(model, skeleton))
    # Counters, which have no shape, aren't listed.
    kept = {name.rpartition(".")[2] for name, one in state.items() if one.shape}  # such as exp_avg
    # The name is random, so rank 0 draws it for all ranks, which write into one folder.
    own_name = from_first(f".tmp-{target.name}-{secrets.token_hex(4)}")
    pending = Pending(
        target,
        progress,
        target.with_name(own_name),
        fabric.global_rank,
        parts,
        pieces,
        skeleton,
        tokenizer,
        probe,
        document={
            "progress": asdict(progress),
            "state_dict_type": state_dict_type,
            "optimizer": class_of(optimizer),
            "optimizer_state": sorted(kept),
            **facts,
        },
        manifest={
            "step": progress.step,
            "world_size": fabric.world_size,
            "versions": versions(),
            **origin,
        },
        ranks_apart=ranks_apart,
    )
    # All ranks must agree that the save can be made before the first file is written.
    _require_finite(pending)
    own_bytes = sum(tensor.nbytes for _, tensor in pending.tensors())
    # Rank 0 needs the bytes of all ranks, and each rank the free memory of all hosts.
    sizes = gather((gethostname(), own_bytes, free_memory_bytes()))
    problem = None
    if pending.rank == 0:
        problem = _try(_make_room, pending, sum(size for _, size, _ in sizes))
    _agree(pending, gather(problem))
    if copy:
        pending.copies = tightest_host(sizes)
    # All ranks have the same sizes, so they decide alike.
    if pending.is_copied:
        _copy_to_host(pending)
    return pending


def _require_finite(pending: Pending) -> None:
    """Raises Fault (76) on all ranks where a tensor of any rank holds NaN or infinity."""
    bad = next((name for name, tensor in pending.tensors() if not is_finite(tensor)), None)
    # All ranks take part, also those without such a tensor: the others would wait for them.
    for name in gather(bad):
        if name is not None:
            sentence = f"{pending.target} isn't saved: {name} holds NaN or infinity."
            raise Fault(sentence, NON_FINITE)


def _make_room(pending: Pending, needed_bytes: int) -> None:
    """On rank 0: check that the checkpoint can be written, and make its directory."""
    failpoint("save.begin")
    target = pending.target
    # Found before anything is written, and not when the finished checkpoint gets its name.
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    require_room(target.parent, needed_bytes, f"Checkpoint {target.name}")
    for folder in pending.parts:
        (pending.temporary / folder).mkdir(parents=True)


def _copy_to_host(pending: Pending) -> None:
    """Training goes on to change the tensors while copies of them are written."""
    # copy=True, because on a CPU `to` alone returns the tensor that training goes on to change.
    for parts in pending.parts.values():
        for number, (name, part) in enumerate(parts):
            parts[number] = name, part._replace(tensor=part.tensor.to("cpu", copy=True))
    if pending.pieces is not None:
        held = pending.pieces.held
        for name, piece in held.items():
            held[name] = piece._replace(tensor=piece.tensor.to("cpu", copy=True))


def tightest_host(sizes: list[tuple[str, int, Optional[int]]]) -> tuple[int, float]:
    """`Pending.copies`. sizes: of each rank its host, the bytes of its copies, and the host's free
    memory, None where unknown."""
    # Ranks of one host share its memory, and each has asked for the free memory at another moment.
    hosts: dict[str, tuple[int, float]] = {}
    for host, size, free in sizes:
        total, least = hosts.get(host, (0, math.inf))
        # A host whose free memory is unknown counts as large enough.
        if free is not None:
            least = min(least, free)
        hosts[host] = total + size, least
    # The host with the least memory left. If that is unknown, the one with most bytes to copy.
    return max(hosts.values(), key=lambda host: (host[0] - host[1], host[0]))


def write(
    pending: Pending,
    group: Optional[ProcessGroup] = None,
    mark: Callable[[], Any] = lambda: None,
) -> Pending:
    """Second act, on all ranks. If the tensors are copies, it runs in a thread, with a process
    group of its own.

    Never raises: `pending.problem` says what went wrong. Whatever a rank's own files give, it takes
    part in what all ranks do together, so that none waits for one that gave up. Each file is hashed
    and flushed while the next one is written, and `mark` is called after each.
    """
    with Describing(pending.temporary, mark) as describing:
        problems = [_try(_write_rest, pending, describing)]
        for folder in pending.parts:
            problems.append(_try(_write_parts, pending, folder, describing))
            problems.append(_try(_bring_parts, pending, folder, describing))
        if pending.pieces is not None:
            problems.append(_try(_write_whole, pending, pending.pieces, group, describing))
        problems.append(_try(_describe, pending, describing))
    pending.problem = next((problem for problem in problems if problem is not None), None)
    return pending


def _write_rest(pending: Pending, describing: Describing) -> None:
    """Write all but parts and weights, on rank 0."""
    if pending.rank == 0:
        trainer = pending.temporary / "trainer"
        # These files would be the same on all ranks, so rank 0 alone writes them.
        saving.write_configuration(pending.temporary, pending.skeleton, pending.tokenizer)
        of_probe = TensorFile(trainer / "probe.safetensors", pending.probe, {"format": "pt"})
        for name, tensor in pending.probe.items():
            of_probe.write(name, tensor)
        (trainer / "progress.json").write_text(json.dumps(pending.document, indent=2) + "\n")
        # The other ranks may be writing their parts already, and describe these themselves.
        there = files.files_in(pending.temporary)
        describing.start(name for name in there if str(Path(name).parent) not in pending.parts)
    failpoint("save.rest")


def _describe(pending: Pending, describing: Describing) -> None:
    pending.entries = describing.entries()
    failpoint("save.hash")


def _write_parts(pending: Pending, folder: str, describing: Describing) -> None:
    """Write this rank's parts, unless it doesn't see rank 0's disk."""
    if pending.ranks_apart is None or not pending.ranks_apart.is_here:
        # Rank 0 has made the folder, unless its disk has gone since. `_require_seen` reports that.
        (pending.temporary / folder).mkdir(parents=True, exist_ok=True)
        for file in _files(pending, folder):
            out = TensorFile(pending.temporary / file.name, file.layout, file.metadata)
            for name, tensor in file.layout.items():
                out.write(name, tensor)
            describing.start([file.name])
    failpoint("save.parts")


def _bring_parts(pending: Pending, folder: str, describing: Describing) -> None:
    """Send rank 0 the parts of ranks that don't see its disk, and write them there."""
    if pending.ranks_apart is None:
        return
    if pending.ranks_apart.is_here:
        apart.send(pending.ranks_apart, partial(_files, pending, folder))
    if pending.rank != 0:
        return
    written: dict[str, TensorFile] = {}

    def write_one(file: apart.File, name: str, tensor: Tensor) -> None:
        if file.name not in written:
            path = pending.temporary / file.name
            written[file.name] = TensorFile(path, file.layout, file.metadata)
        if written[file.name].write(name, tensor):
            describing.start([file.name])

    problem = None
    for sender in pending.ranks_apart.ranks:
        # All is received even after a problem, so that no rank waits.
        for received in apart.receive(pending.ranks_apart, sender):
            if problem is None:
                problem = _try(write_one, *received)
    if problem is not None:
        raise problem


def _files(pending: Pending, folder: str) -> list[apart.File]:
    """This rank's parts: in one file, or many bytes in several of about the same size."""
    shares, in_files = _shares(pending.parts[folder]), []
    for number, share in enumerate(shares, start=1):
        # Name and header are as torch.distributed.checkpoint has them, so its tools read the file.
        file = (
            f"{folder}/shard-{pending.rank + 1:05}-model-{number:05}-of-{len(shares):05}"
            ".safetensors"
        )
        # A file says where each of its parts begins in the whole tensor.
        offsets = {name: {dcp.SAVED_OFFSETS_KEY: part.offsets} for name, part in share.items()}
        metadata = {
            dcp.CUSTOM_METADATA_KEY: json.dumps(offsets),
            dcp.DCP_VERSION_KEY: str(dcp.HF_DCP_VERSION),
            "format": "pt",
        }
        layout = {name: part.tensor for name, part in share.items()}
        in_files.append(apart.File(file, layout, metadata))
    return in_files


def _shares(parts: list[tuple[str, Part]]) -> list[dict[str, Part]]:
    """The parts of each file: at most one of each tensor, and about as many bytes as in the other
    files."""
    count = 1
    # Few bytes aren't worth several files.
    if sum(part.tensor.nbytes for _, part in parts) >= MANY_BYTES:
        count = files.THREADS
    shares: list[dict[str, Part]] = [{} for _ in range(count)]
    sizes = [0] * count
    # The largest first, each into the file that holds least so far.
    for name, part in sorted(parts, key=lambda one: -one[1].tensor.nbytes):
        # A file holds each name once, so two parts of one tensor go into two files.
        free = [number for number, share in enumerate(shares) if name not in share]
        # A tensor has more parts than there are files: add one.
        if not free:
            free = [len(shares)]
            shares.append({})
            sizes.append(0)
        number = min(free, key=sizes.__getitem__)
        shares[number][name] = part
        sizes[number] += part.tensor.nbytes
    return [share for share in shares if share]


def _write_whole(
    pending: Pending,
    pieces: whole.Pieces,
    group: Optional[ProcessGroup],
    describing: Describing,
) -> None:
    """Write the weights on rank 0, as the ranks send them. A rank 0 that can't write goes on to
    receive, so that none waits."""
    # A list, which the lambda below can fill.
    opened: list[saving.WeightFiles] = []  # on rank 0

    def begin_files() -> None:
        opened.append(saving.WeightFiles(pending.temporary, pieces.skeleton))
        describing.start(opened[0].index)

    problem = None
    if pending.rank == 0:
        problem = _try(begin_files)
    # The other ranks send in this loop, so it runs to its end even after a problem.
    for weights in pieces.of_units(group):
        if opened and problem is None:
            problem = _try(lambda: describing.start(opened[0].write(weights)))
    if problem is not None:
        raise problem


class Background:
    """Writes checkpoints while training goes on, one at a time, with a process group of its own.
    All ranks make one."""

    def __init__(self, model: nn.Module, timeout: timedelta) -> None:
        """timeout: of the group, for what a rank waits for the slowest to write."""
        ranks = from_first(shard_ranks(model))  # those that send weights to rank 0
        # A group of its own, because collectives of two threads in one group could be mixed up. Of
        # gloo, because what it sends are copies in the host's memory.
        self.group = None
        if not alone():
            self.group = torch.distributed.new_group(ranks, timeout, backend="gloo")
        # One thread, so that all ranks write checkpoints in the same order.
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.has_written = False

    def write(self, pending: Pending) -> Future[Pending]:
        """The second act, of what `is_copied`."""
        self.has_written = True
        return self.pool.submit(write, pending, self.group)


def commit(pending: Pending, before: Callable[[], None] = lambda: None) -> None:
    """Third act, on all ranks: publish what all have written, on rank 0 after `before()`. Raises
    Fault (74) on all ranks."""
    answers = gather((pending.entries, pending.problem))
    # All ranks know all answers now, so they all raise or all go on.
    _agree(pending, [problem for _, problem in answers])
    written: dict[str, files.Entry] = {}
    for entries, _ in answers:
        written |= entries

    def seal() -> None:
        # All that can fail comes before the rename, which can't be taken back.
        for rank, (entries, _) in enumerate(answers):
            _require_seen(pending, rank, entries)
        before()
        publish(
            pending.temporary,
            pending.target,
            {**pending.manifest, "files": dict(sorted(written.items()))},
        )

    problem = None
    if pending.rank == 0:
        problem = _try(seal)
    _agree(pending, gather(problem))


def _require_seen(pending: Pending, rank: int, entries: dict[str, files.Entry]) -> None:
    """Raises Fault (74) unless the files that `rank` has written are here: another machine may have
    written them elsewhere."""
    for name, entry in entries.items():
        path, size = pending.temporary / name, None
        # NFS asks its server when a file is opened. The size alone could come from its cache.
        with (
            suppress(FileNotFoundError),
            path.open("rb") as file,
        ):
            size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise Fault(
                f"{pending.target} isn't saved: rank 0 doesn't see {name} as rank {rank} has "
                "written it; "
                f"{str(pending.target.parent)!r} must be on a disk that all machines share.",
                SAVE_FAILED,
                retryable=False,
            )


def publish(temporary: Path, target: Path, document: dict[str, Any]) -> None:
    """Give a complete directory, whose files are durable, its manifest and its name: the one commit
    point."""
    failpoint("publish.begin")
    (temporary / MANIFEST).write_bytes(files.encode(document))
    failpoint("publish.manifest")
    # The manifest and all folders must be on the disk before the checkpoint has its name. The other
    # files are, since `write` has flushed them.
    folders = [path for path in temporary.rglob("*") if path.is_dir()]
    for path in (temporary / MANIFEST, *folders, temporary):
        fsync(path)
    failpoint("publish.before_rename")
    temporary.rename(target)
    failpoint("publish.renamed")
    # Until the folder is on the disk, a crash of the machine may take the new name away.
    fsync(target.parent)
    failpoint("publish.done")


def require_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises Fault (74) unless the disk that holds `folder` has `needed_bytes` and a little
    more."""
    advice = "make room, or take an --output_dir on another disk"
    # Only where some are kept would fewer of them make room.
    if files.checkpoints(folder):
        advice = "make room, or keep fewer checkpoints (--keep_last)"
    files.room(folder, needed_bytes, what, advice)


def _try(action: Callable[..., None], *given: Any) -> Optional[Fault]:
    """What went wrong, for `_agree`; None if nothing."""
    try:
        action(*given)
    except Exception as error:
        fault = as_fault(error)
        # These have a sentence or an exit code of their own.
        if fault is error or fault.code in (PEER_LOST, OUT_OF_MEMORY, STOPPED):
            return fault
        return Fault(one_line(error) or type(error).__name__, SAVE_FAILED)
    return None


def _agree(pending: Pending, problems: Sequence[Optional[Fault]]) -> None:
    """Raise the first rank's problem on all ranks, if there is any, and remove what was written."""
    for rank, problem in enumerate(problems):
        if problem is None:
            continue
        # Each rank removes it, in case they share no disk.
        shutil.rmtree(pending.temporary, ignore_errors=True)
        # The sentence of such a fault already says what failed.
        if problem.code != SAVE_FAILED or not problem.retryable:
            raise problem
        raise Fault(f"{pending.target} couldn't be saved, rank {rank}: {problem}", SAVE_FAILED)


def record_probe(model: nn.Module, input_ids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What the model in training makes of a fixed batch, for export_hf.py to compare with. All
    ranks call it.

    input_ids: int64 [1, context]. Returns input_ids, positions int64 [up to 16], logits float32
    [positions, vocabulary].
    """
    # A few positions are enough, and the logits of a whole row could take gigabytes.
    positions = torch.linspace(0, input_ids.shape[1] - 1, min(16, input_ids.shape[1])).long()
    # Without dropout, so that a reader of the checkpoint can compute the same logits.
    model.eval()
    with torch.no_grad():
        logits = model(input_ids.to(device))
    model.train()
    return {
        "input_ids": input_ids,
        "positions": positions,
        "logits": logits[0, positions].float().cpu().contiguous(),
    }
