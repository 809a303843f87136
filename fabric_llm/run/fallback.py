"""A fast path that fails on the devices at hand before the first step is done: the run starts again
without it, on all ranks.

A rank that fails leaves the others waiting in a collective, and a GPU after an illegal access takes
no more work. So nothing is mended in a process: each one starts its command once more, with the flag
that turns the path off.
"""

from collections.abc import Iterator
from traceback import walk_tb
from typing import Callable, NamedTuple, Optional

from fabric_llm.base.faults import UNEXPECTED, Fault, one_line
from fabric_llm.plan.plan import ModelPlan


class FastPath(NamedTuple):
    """One that a run can do without."""

    name: str
    is_taken: Callable[[ModelPlan], bool]
    sources: tuple[str, ...]  # parts of the names of the files whose errors are its own
    without: tuple[str, str]  # the flag that turns it off


# In the order in which they go where an error of CUDA doesn't say whose it is.
FAST_PATHS = (
    FastPath(
        "products in 8 bits",
        lambda model: model.float8 != "none",
        ("model/float8.py", "/torchao/"),
        ("--float8", "none"),
    ),
    FastPath(
        "the inputs of layers in the host's memory",
        lambda model: model.activation_checkpointing == "offload",
        ("model/offload.py",),
        ("--activation_checkpointing", "full"),
    ),
    FastPath(
        "packed attention",
        lambda model: model.config._attn_implementation == "packed",
        ("model/packed_attention.py", "attention/varlen.py"),
        ("--attention", "sdpa"),
    ),
    FastPath(
        "the chunked loss",
        lambda model: model.loss == "chunked",
        ("model/chunked_loss.py",),
        ("--loss", "full"),
    ),
    # The last: its frames surround those of the others.
    FastPath(
        "compiled layers",
        lambda model: model.compiles,
        ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/"),
        ("--compile", "false"),
    ),
)


def without_fast_path(error: BaseException, fault: Fault, model: ModelPlan, rank: int) -> Fault:
    """`fault`, which `error` is on this rank; where a fast path that `model` takes has failed, with
    the flags of a run without it.

    What a user can correct, and memory that isn't enough, have codes of their own: no other path
    helps there.
    """
    if fault.code != UNEXPECTED:
        return fault
    # Only a path that this run takes can be turned off.
    failed = _failed_path(error, [path for path in FAST_PATHS if path.is_taken(model)])
    if failed is None:
        return fault
    # The sentence is printed as a warning and kept in events.jsonl, so it stays short.
    reason = one_line(fault)[:300].rstrip(".")
    flag = " ".join(failed.without)
    return Fault(
        f"{failed.name} failed on rank {rank} before the first step was done, so the run starts "
        f"again with {flag} ({reason}).",
        UNEXPECTED,
        again=failed.without,
    )


def _failed_path(error: BaseException, taken: list[FastPath]) -> Optional[FastPath]:
    # The innermost file decides: compiled layers are around all other paths.
    for file in _files(error):
        for path in taken:
            if any(source in file for source in path.sources):
                return path
    # Kernels run later than they are asked for: the frames of such an error say nothing.
    if taken and "CUDA error" in str(error):
        return taken[0]
    return None


def _files(error: Optional[BaseException]) -> Iterator[str]:
    """Names of the files that an error has come through, and those that it was raised from, the
    innermost first."""
    while error is not None:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            yield frame.f_code.co_filename.replace("\\", "/")
        # Where this error has replaced another one, the frames of that one say more.
        error = error.__cause__ or error.__context__
