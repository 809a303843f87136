"""Rank 0 locks the run directory and starts the other ranks of its machine, before any of them imports torch.

Importing takes seconds, which all ranks spend side by side. So nothing here imports what a run needs later.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Optional

from fabric_llm.base.command_line import Flags, fail, is_rank_zero
from fabric_llm.base.faults import DONE, UNEXPECTED, Fault, as_mistake, tell_torchrun
from fabric_llm.plan import checks, resume, run_directory
from fabric_llm.plan.placement import Placement, batch_sizes, place, require_fit
from fabric_llm.prepare.demo import prepare_demo
from fabric_llm.processes.launch import Children, for_launcher, require_port, start_ranks, started_by_other

if TYPE_CHECKING:  # what needs torch is imported by then
    from fabric_llm.base.fabric import Fabric
    from fabric_llm.plan.plan import Plan
    from fabric_llm.processes.watch import Watch


@dataclass
class ThisRank:
    """One rank of a run, in its own process; what comes later is None until then."""

    placement: Placement
    children: Children  # the ranks that this process has started
    directory: Optional[Path]  # of the run, locked by rank 0; on other ranks once they have joined
    problem: Optional[Fault]  # with the directory, which others, started by somebody else, have to hear of
    rank: int = 0
    fabric: Optional[Fabric] = None
    watch: Optional[Watch] = None
    plan: Optional[Plan] = None


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Around all that train.py does: what no rank has told yet, since there were no ranks, is told here."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        fault = as_mistake(error)
        run_directory.leave(fault)
        if fault.code == UNEXPECTED:
            tell_torchrun(traceback.format_exc())
            raise
        if fault.code == DONE:
            raise SystemExit(DONE) from None
        fail("train.py", str(fault), for_launcher(fault.code))


def leave_at_once(fault: Fault) -> NoReturn:
    """In a signal's handler, before this rank meets the others: end, and the ranks that this process has started with it."""
    try:
        run_directory.leave(fault)
        fail("train.py", str(fault), fault.code)
    finally:
        os._exit(for_launcher(fault.code))


@contextmanager
def without_collection() -> Iterator[None]:
    """Around imports: of the million objects that they make none is garbage, so Python needn't look through them."""
    if not gc.isenabled() or "torch" in sys.modules:  # of a process that has imported it all: there is nothing to gain
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # nor later
        gc.enable()


def start(flags: Flags) -> ThisRank:
    """Start the other ranks of this machine, unless others did. Raises Fault.

    What is wrong with the run directory ends the run before a rank is started.
    """
    placement = place(flags)
    require_fit(flags, placement)
    checks.check_mixture_length(flags, batch_sizes(flags, placement)[2])
    starts = placement.world_size > 1 and not flags.devices.tpu and not started_by_other()
    if placement.world_size > 1 and not flags.devices.tpu and not starts:
        require_port()
    if placement.num_nodes == 1 and not started_by_other():
        os.environ.pop("NODE_RANK", None)  # of something else: this process is the first of its run
    if starts and placement.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
        raise Fault(
            f"--num_nodes {placement.num_nodes}: start the command on each machine with torchrun and --devices auto, "
            "or set MASTER_ADDR, MASTER_PORT and NODE_RANK."
        )
    if flags.demo:
        prepare_demo(Path(flags.data.train_data_dir), flags.data.context_length)
    directory, problem = _locked_directory(flags) if is_rank_zero() else (None, None)
    if problem is not None and (placement.world_size == 1 or starts):
        raise problem
    children = start_ranks(placement.devices, placement.num_nodes) if starts else Children({})
    return ThisRank(placement, children, directory, problem)


def _locked_directory(flags: Flags) -> tuple[Optional[Path], Optional[Fault]]:
    """(the run directory, locked by this process, None), or (None, what is wrong with it)."""
    try:
        directory = resume.directory(flags)
        run_directory.require_writable(directory)
        run_directory.lock(directory)
        return directory, None
    except ValueError as error:
        return None, as_mistake(error)
