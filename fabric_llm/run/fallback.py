"""A fast path that fails on the devices at hand before the first step is done: the run starts again
without it, on all ranks.

A rank that fails leaves the others waiting in a collective, and a GPU after an illegal access takes
no more work. So nothing is mended in a process: each one starts its command once more, with the
flag that turns the path off.
"""

import os
from collections.abc import Iterator
from traceback import walk_tb
from typing import Callable, NamedTuple, Optional

from fabric_llm.base.command_line import AGAIN
from fabric_llm.base.faults import BAD_INPUT, SAVE_FAILED, UNEXPECTED, Fault, one_line
from fabric_llm.plan.plan import Plan


class FastPath(NamedTuple):
    """One that a run can do without."""

    name: str
    is_taken: Callable[[Plan], bool]
    sources: tuple[str, ...]  # parts of the names of the files whose errors are its own
    without: tuple[str, str]  # the flag that turns it off


# In the order in which they go where an error of CUDA doesn't say whose it is.
FAST_PATHS = (
    FastPath(
        "products in 8 bits",
        lambda plan: plan.model.float8 != "none",
        ("fabric_llm/model/float8.py", "-packages/torchao/"),
        ("--float8", "none"),
    ),
    FastPath(
        "the inputs of layers in the host's memory",
        lambda plan: plan.model.activation_checkpointing == "offload",
        ("fabric_llm/model/offload.py",),
        ("--activation_checkpointing", "full"),
    ),
    FastPath(
        "packed attention",
        # Ranks that share rows have no other attention.
        lambda plan: (
            plan.model.config._attn_implementation == "packed"
            and plan.placement.context_parallel == 1
        ),
        ("fabric_llm/model/packed_attention.py", "/torch/nn/attention/varlen.py"),
        ("--attention", "sdpa"),
    ),
    FastPath(
        "the chunked loss",
        lambda plan: plan.model.loss == "chunked",
        ("fabric_llm/model/chunked_loss.py",),
        ("--loss", "full"),
    ),
    # The last: its frames surround those of the others.
    FastPath(
        "compiled layers",
        lambda plan: plan.model.compiles,
        ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "-packages/triton/"),
        ("--compile", "false"),
    ),
)
# The optimizer's kernel is compiled, too, and has a plain path of its own.
NOT_A_PATH = "fabric_llm/training/adamw"


def without_fast_path(error: BaseException, fault: Fault, plan: Plan, rank: int) -> Fault:
    """What this rank ends with after `error`, of which `fault` is made. Where a fast path that the
    completed `plan` takes has failed, it is a Fault that starts the run again without that path,
    else `fault` itself.

    What a user can correct, a lost rank, and memory that isn't enough have codes of their own: no
    other path helps there.
    """
    # A compiler that can't write its cache or lacks a package has the code of a disk or a mistake.
    of_library = fault.code in (SAVE_FAILED, BAD_INPUT) and not isinstance(error, ValueError)
    if fault.code != UNEXPECTED and not of_library:
        return fault
    # A path can be turned off where this run takes it, and only once: a command that doesn't take
    # its flag would start again for ever.
    before = os.environ.get(AGAIN, "")
    taken = [path for path in FAST_PATHS if path.is_taken(plan) and path.without[0] not in before]
    failed = _failed_path(error, taken)
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
    files = list(_files(error))
    # Its frames lead to the compiler, although no path of the model has failed. An error of
    # CUDA, which its frames don't explain, is still judged below.
    if any(NOT_A_PATH in file for file in files):
        files = []
    for file in files:
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
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            yield frame.f_code.co_filename.replace("\\", "/")
        # Where this error has replaced another one, the frames of that one say more.
        followed = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or followed
