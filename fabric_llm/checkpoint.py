"""Write a checkpoint and read it again; retention.py has the checkpoints of a run.

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
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from fabric_llm import check as checks
from fabric_llm import manifest
from fabric_llm.failpoints import failpoint
from fabric_llm.faults import (
    NO_CHECKPOINT,
    NON_FINITE,
    OUT_OF_MEMORY,
    PEER_LOST,
    REFUSED,
    SAVE_FAILED,
    STOPPED,
    Fault,
    as_fault,
)
from fabric_llm.manifest import MANIFEST, fsync
from fabric_llm.ranks import alone, from_first, gather
from fabric_llm.strategy import reshard

PREFIX = "causal_lm."  # of parameter names in model.LanguageModel
MOST_COUNTED = 2**53  # steps, sequences, tokens: far beyond any run
MANY_ELEMENTS = 2**24  # of all ranks together


@dataclass(frozen=True)
class Progress:
    """Where a run is. All that a resumed run needs besides weights and optimizer state."""

    step: int = 0  # finished optimizer steps
    position: int = 0  # sequences consumed by all ranks together
    tokens: int = 0  # tokens of those sequences

    def advance(self, sequences: int, context_length: int) -> Progress:
        """One step further."""
        return replace(
            self,
            step=self.step + 1,
            position=self.position + sequences,
            tokens=self.tokens + sequences * context_length,
        )


def step_directory(run_directory: Path, step: int) -> Path:
    """checkpoints/RUN/step-00000100"""
    return run_directory / f"step-{step:08d}"


# ------------------------------------------------------------------------------- save


@dataclass
class Pending:
    """A checkpoint on its way."""

    target: Path  # step-N
    temporary: Path  # .tmp-step-N-*
    rank: int
    parts: dict[str, dict[str, Any]]  # folder -> tensors of which each rank writes its parts
    rest: Callable[[Path], None]  # writes all other files, on rank 0
    document: dict[str, Any]  # the manifest, but for the files
    entries: dict[str, manifest.Entry]  # of this rank's files, once they are written
    problem: Optional[Fault] = None  # why they are not


def save(target: Path, fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, **what: Any) -> None:
    """All three acts at once. All ranks call it; arguments and errors as in `begin`, errors of writing likewise."""
    pending = begin(target, fabric, model, optimizer, **what)
    write(pending)
    commit(pending)


def begin(
    target: Path,
    fabric: Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    template: PreTrainedModel,
    tokenizer: Optional[Any],
    progress: Progress,
    facts: dict[str, Any],
    origin: dict[str, Any],
    probe: dict[str, Tensor],
    state_dict_type: str,
    copy: bool = False,
) -> Pending:
    """First act, on all ranks: take the tensors, check the room, make the temporary directory.

    model: the wrapped model without Fabric's own wrapper. template: the unwrapped model on the meta device, for its
    config and names. facts: what a resumed run must have in common with this one. origin: hashes of what the run was
    made from, for the manifest. probe: see `record_probe`. copy: so that training can go on before `commit`.
    Raises Fault (74) on all ranks: `target` exists (nothing is ever overwritten), no room, not writable.
    """
    reshard(model)
    rank = fabric.global_rank
    parts = {"trainer/optimizer": _optimizer_tensors(model, optimizer)[1]}
    weights: Optional[dict[str, Tensor]] = None
    if state_dict_type == "full":
        weights = _full_weights(model, template, offload=fabric.device.type != "cpu")
    else:
        parts["weights"] = _sharded_weights(model, template)
    own = [*parts.values(), {**(weights or {}), **probe} if rank == 0 else {}]
    bad = next((name for some in own for name, tensor in some.items() if not _is_finite(tensor)), None)
    if found := [name for name in gather(bad) if name is not None]:
        raise Fault(f"{target} isn't saved: {found[0]} holds NaN or infinity.", NON_FINITE)
    needed_bytes = sum(gather(sum(_own_bytes(t, rank) for some in own for t in some.values())))
    if copy:
        with _quiet():
            parts = {folder: BlockingAsyncStager().stage(tensors) for folder, tensors in parts.items()}
            if weights is not None:
                weights = BlockingAsyncStager().stage(weights) if rank == 0 else {}

    said = {"progress": asdict(progress), "state_dict_type": state_dict_type, **facts}
    rest = partial(_write_rest, template=template, weights=weights, tokenizer=tokenizer, probe=probe, said=said)
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
    template: PreTrainedModel,
    weights: Optional[dict[str, Tensor]],
    tokenizer: Optional[Any],
    probe: dict[str, Tensor],
    said: dict[str, Any],
) -> None:
    """Everything that is nobody's part: config, tokenizer, probe, progress, and whole weights if there are some."""
    if weights is not None:
        template.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    else:
        template.config.save_pretrained(folder)
        if template.generation_config is not None:
            template.generation_config.save_pretrained(folder)
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
    with manifest.Describing(pending.temporary) as describing:

        def rest() -> None:
            if pending.rank == 0:
                pending.rest(pending.temporary)
            failpoint("save.rest")
            describing.start(_own_files(pending))

        def together(folder: str, tensors: dict[str, Any]) -> None:
            with _quiet():
                writer = _writer(pending.temporary / folder, tensors)
                writer.fs = _Files(lambda path: describing.start([str(path.relative_to(pending.temporary))]))
                dcp.save(tensors, storage_writer=writer, process_group=group)

        def part_is_there() -> None:
            failpoint("save.parts")
            describing.start(_own_files(pending))

        def described() -> None:
            pending.entries = describing.entries()
            failpoint("save.hash")

        problems = [_try(rest)]
        for folder, tensors in pending.parts.items():  # each of them, as the others do, whatever went wrong here
            problems += [_try(partial(together, folder, tensors)), _try(part_is_there)]
        problems.append(_try(described))
        pending.problem = next((problem for problem in problems if problem is not None), None)


def _writer(folder: Path, tensors: dict[str, Any]) -> HuggingFaceStorageWriter:
    """Each rank's parts in one file, or, where there is much, in several of about the same size, for `write`."""
    sizes = {name: tensor.numel() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if sum(sizes.values()) < MANY_ELEMENTS:
        return HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    filled, file_of = [0] * manifest.THREADS, {}
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
    files = {name: entry for entries, _ in answers for name, entry in entries.items()}
    document = {**pending.document, "files": dict(sorted(files.items()))}

    def seal() -> None:
        for rank, (entries, _) in enumerate(answers):
            _require_seen(pending, rank, entries)
        before()
        publish(pending.temporary, pending.target, document)

    _agree(pending, gather(_try(seal) if pending.rank == 0 else None))


def _require_seen(pending: Pending, rank: int, entries: dict[str, manifest.Entry]) -> None:
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
    (temporary / MANIFEST).write_bytes(manifest.encode(document))
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
    checks.room(folder, needed_bytes, what, "make room, or keep fewer checkpoints (--keep_last)")


def versions() -> dict[str, str]:
    """Of the packages that write and read checkpoints."""
    return {name: version(name) for name in ("torch", "lightning", "transformers", "safetensors")}


def _try(action: Callable[[], None]) -> Optional[Fault]:
    """What went wrong, for `_agree`; None if nothing."""
    try:
        action()
    except (Exception, dcp.CheckpointException) as error:  # which is none
        failures = getattr(error, "failures", None)  # torch.distributed.checkpoint's: rank -> (exception, traceback)
        first = min(failures.items())[1][0] if failures else error
        if isinstance(first, Fault) or as_fault(first).code in (PEER_LOST, OUT_OF_MEMORY, STOPPED):
            return as_fault(first)
        return Fault(" ".join(str(first).split()) or type(first).__name__, SAVE_FAILED)
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


def _own_files(pending: Pending) -> list[str]:
    """Files that this rank has written: its parts, and on rank 0 everything that is nobody's part."""
    names = {name: re.search(r"/shard-(\d+)-[^/]*$", name) for name in manifest.files_in(pending.temporary)}
    return [name for name, part in names.items() if (int(part[1]) - 1 if part else 0) == pending.rank]


def _is_finite(tensor: Any) -> bool:
    """False if this rank's part of a tensor holds NaN or infinity: no checkpoint may."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not isinstance(local, Tensor) or bool(torch.isfinite(local).all())


def _own_bytes(tensor: Any, rank: int) -> int:
    """Bytes of a tensor that this rank will write: its part of a DTensor, on rank 0 anything else."""
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        replica = any(isinstance(p, Replicate) and c for p, c in zip(tensor.placements, coordinate))
        local = tensor.to_local()
        return 0 if replica else local.numel() * local.element_size()
    return tensor.numel() * tensor.element_size() if rank == 0 and isinstance(tensor, Tensor) else 0


def tied_names(model: nn.Module) -> set[str]:
    """Second names of parameters that have two, such as lm_head.weight where it is the embedding."""
    once = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - once


def _full_weights(model: nn.Module, template: PreTrainedModel, offload: bool) -> dict[str, Tensor]:
    """HF name -> whole tensor, each tied one once, on rank 0 (on a CPU on all ranks: offload_to_cpu crashes there)."""
    with _quiet():
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    again = tied_names(template)
    return {hf: tensor for name, tensor in state.items() if (hf := name.removeprefix(PREFIX)) not in again}


def _sharded_weights(model: nn.Module, template: PreTrainedModel) -> dict[str, Any]:
    """Parameter name -> this rank's part, as DTensor; each tied parameter once."""
    again = tied_names(template)
    with _quiet():
        tensors = get_model_state_dict(model)
    return {name: tensor for name, tensor in tensors.items() if name.removeprefix(PREFIX) not in again}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's flat state dict, and its tensors: `state.NAME.exp_avg` and the like.

    What isn't a tensor (learning rate, betas) comes from the arguments of the run, not from a checkpoint.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric's wrapper
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return flat, {key: value for key, value in flat.items() if key.startswith("state.")}


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


# ------------------------------------------------------------------------------- check


def verified(path: Path, hashes: bool = False) -> dict[str, Any]:
    """A checkpoint's progress.json, once exactly its files are there with the right sizes (and hashes).

    Raises Fault that names the first file that isn't (66), or that is refused for security (77).
    """
    if path.is_symlink():
        raise Fault(f"{str(path)!r} is a link, which may lead out of the run directory: refused.", REFUSED)
    if not (path / MANIFEST).is_file():
        raise Fault(f"{str(path)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)
    listed = manifest.check_folder(path, hashes)["files"]
    for index in path.glob("*.index.json"):
        _check_index(index, listed)
    return read_progress(path)


def _check_index(index: Path, listed: dict[str, Any]) -> None:
    """Weight files that an index names are the checkpoint's own."""
    try:
        files = manifest.weight_map(index).values()
    except Fault:
        raise
    except ValueError as error:
        raise _damaged(index.parent, f"{index.name} can't be read.") from error
    if foreign := sorted(set(files) - listed.keys()):
        raise _damaged(index.parent, f"{index.name} names {foreign[0]}, which isn't there.")


def read_progress(path: Path) -> dict[str, Any]:
    """progress.json of a checkpoint. Raises Fault (66) where it isn't one."""
    try:
        document = json.loads((path / "trainer" / "progress.json").read_bytes())
        numbers = [document["progress"][field.name] for field in fields(Progress)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "trainer/progress.json can't be read.") from error
    fits = all(type(number) is int and 0 <= number < MOST_COUNTED for number in numbers)
    if not fits or len(document["progress"]) != len(numbers):
        raise _damaged(path, f"trainer/progress.json says {document['progress']}.")
    return document


def _damaged(path: Path, how: str) -> Fault:
    return Fault(f"{str(path)!r} is damaged: {how}", NO_CHECKPOINT)


# ------------------------------------------------------------------------------- load


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill the optimizer of a wrapped model from a checkpoint, whatever ranks and strategy wrote it. All ranks call it."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    flat, tensors = _optimizer_tensors(model, optimizer)
    _load_parts(tensors, path / "trainer" / "optimizer")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, {**flat, **tensors}, options=options)


def _load_parts(tensors: dict[str, Any], folder: Path) -> None:
    """Fill `tensors`. Raises Fault (66) where the parts are others."""
    with _quiet(), _reading(folder):
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What is wrong with the content of files, which hashes don't tell where somebody made them so, as Fault (66)."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        failures = getattr(error, "failures", None)
        first = min(failures.items())[1][0] if failures else error
        if as_fault(first).code in (PEER_LOST, OUT_OF_MEMORY, STOPPED):
            raise as_fault(first) from error
        raise Fault(f"{str(path)!r} can't be read: {' '.join(str(first).split())[:400]}.", NO_CHECKPOINT) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings of what is meant: one device has no process group, NO_SHARD holds everything."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
        yield


def sharded_weights(path: Path, expected: nn.Module) -> Optional[dict[str, Tensor]]:
    """The whole weights of a sharded checkpoint by HF name, on the CPU; None if `path` isn't one. One process.

    expected: the model that they are for, on the meta device. Raises Fault (66) before memory is taken for a tensor
    that it doesn't have.
    """
    folder = path / "weights"
    if not folder.is_dir():
        return None
    declared = whole_shapes(folder)
    wanted = {PREFIX + name: shape for name, shape in (*shapes(expected), *persistent_buffers(expected))}
    for name in sorted(declared.keys() ^ wanted.keys()) or sorted(n for n in wanted if declared[n] != wanted[n]):
        here, there = (list(some[name]) if name in some else "nothing" for some in (declared, wanted))
        raise _damaged(path, f"weights hold {here} as {name}, the model {there}.")
    weights = whole_tensors(folder)
    return {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}


def whole_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape that the parts in a folder declare for the whole tensor."""
    with _reading(folder):
        metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
        return {name: tuple(entry.size) for name, entry in metadata.items()}


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Name -> tensor put together from the parts in a folder, on the CPU. One process."""
    metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    with _quiet(), _reading(folder):
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)), no_dist=True)
    return tensors


def read_probe(path: Path) -> dict[str, Tensor]:
    """The recorded probe of a checkpoint, see `record_probe`. Raises Fault (66) where it isn't one."""
    with _reading(path / "trainer" / "probe.safetensors"):
        with safe_open(path / "trainer" / "probe.safetensors", framework="pt") as file:
            probe = {key: file.get_tensor(key) for key in file.keys()}
        (_, context), (count, vocabulary) = probe["input_ids"].shape, probe["logits"].shape
        for key, shape, limit in (("input_ids", (1, context), vocabulary), ("positions", (count,), context)):
            values = probe[key]
            of_kind = tuple(values.shape) == shape and values.dtype == torch.int64
            if not of_kind or not 0 <= values.min() <= values.max() < limit:
                raise ValueError(f"{key} isn't int64 {list(shape)} of 0 to {limit - 1}")
    return probe


def shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every parameter."""
    return ((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every buffer that is saved with the parameters, such as an expert router's correction."""
    saved = model.state_dict()
    return ((name, tuple(buffer.shape)) for name, buffer in model.named_buffers() if name in saved)
