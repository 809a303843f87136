"""The ranks of a run join, plan, train and end. Whatever ends a rank becomes one sentence for the
user, an exit code, and STATUS.json. processes/watch.py finds out which rank failed first.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Optional

import torch

from fabric_llm.base import faults, ranks, register
from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.fabric import SLURMEnvironment
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import Fault, as_fault, as_mistake
from fabric_llm.base.flag import Flags
from fabric_llm.checkpoint import apart, keep
from fabric_llm.model.strategy import make_fabric
from fabric_llm.plan import checks, fetched, mirrored, resumption, run_directory, run_status
from fabric_llm.plan.make_plan import make_plan
from fabric_llm.plan.model_plan import require_whole
from fabric_llm.plan.start import ThisRank, place
from fabric_llm.plan.warnings import warnings_of
from fabric_llm.processes import launch
from fabric_llm.processes.stop import StopSignal, at_start, interrupt
from fabric_llm.processes.watch import Watch
from fabric_llm.run import copies
from fabric_llm.run.fallback import without_fast_path
from fabric_llm.run.run import say_what_is_left
from fabric_llm.run.speed import peak_memory_gib

# Rank 0 holds the store, so it waits so long for the others to read its fault. Children have as
# long to end.
SECONDS_FOR_OTHERS = 5.0
# The main thread of rank 0 may need all of the first number.
SECONDS_FOR_RANK_0 = launch.SECONDS_TO_END + SECONDS_FOR_OTHERS
SECONDS_FOR_CHILDREN = 60.0  # to end after a run without a fault


def supervise(this: ThisRank, flags: Flags, signals: StopSignal, body: Callable[[], bool]) -> None:
    """Join the other ranks, plan, and run `body()`, which returns whether the run was asked to
    stop. All ranks call it.

    Raises SystemExit with a code of docs/faults.md, unless the run is done, or has stopped under a
    torchrun that would restart it.
    """

    def stuck(fault: Fault) -> NoReturn:
        """Called in the watching thread, when the main thread is stuck."""
        # The main thread can't be reached, so this thread ends the process whatever `_end` meets.
        code = faults.PEER_LOST
        try:
            code = _end(this, flags, fault, signals, is_stuck=True)
        finally:
            os._exit(launch.for_launcher(code))

    placement = this.placement
    # `placement` may have been made without torch. Now that torch is imported, it counts the GPUs.
    if place(flags) != placement:
        raise Fault(
            "PyTorch sees GPUs that /dev doesn't show: say --accelerator cuda to use them, or cpu."
        )
    this.fabric = make_fabric(placement, flags.model.precision, flags.devices.hang_timeout)
    # On TPUs there is no store in which ranks could hear of each other.
    watched = 1 if flags.devices.tpu else placement.world_size
    # Fabric says the rank only once all have joined, but the watch begins before that.
    this.rank = int(os.environ["RANK"]) if watched > 1 else 0
    this.watch = Watch(this.rank, watched, stuck, this.children, signals.is_asked)
    try:
        _join(this, flags, signals)
        failpoint("assembled")
        _plan_together(this, flags)
        stopped = body()
    # Also Ctrl-C and SystemExit: whatever ends this rank, the others are told.
    except BaseException as error:
        # From here on the watching thread doesn't end the process as well.
        this.watch.claim_end()
        fault = as_fault(error)
        if fault.code == faults.OUT_OF_MEMORY and this.plan is not None:
            fault = _out_of_memory(this, fault)
        # Until this process has finished a step, starting again loses nothing. The log counts
        # them, since a rewind takes the step's number back.
        has_done_none = this.log is None or this.log.speed.steps == 0
        is_first_step = this.plan is not None and has_done_none
        falls_back = this.is_program and flags.model.fast_paths == "fall_back"
        if is_first_step and falls_back and not signals.is_to_stop():
            fault = without_fast_path(error, fault, this.plan, this.rank)
        if fault.code == faults.UNEXPECTED:
            traceback.print_exc()
        code = _end(this, flags, fault, signals)
    else:
        # The run has ended, and mustn't end once more as one that was interrupted. With a mirror,
        # the handler of save.wait_for_mirror raises nothing, and cuts the mirror's end short.
        if this.mirror is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        code, reason = faults.DONE, "done"
        if stopped:
            code, reason = faults.STOPPED, "stopped on request"
        if _writes_status(this):
            run_status.write_status(this.directory, code, reason, this.watch.step, stopped)
        this.children.end(SECONDS_FOR_CHILDREN)
    copies.remove(this.ranks_apart, this.directory)
    # After any other end the mirror's process goes on by itself, for as long as the flag says.
    if this.mirror is not None and code in (faults.DONE, faults.STOPPED):
        code = _close_mirror(this, code)
    this.watch.close()  # as in tests, the process may go on
    if this.directory is not None:
        run_directory.unlock(this.directory)
    if code != faults.DONE:
        raise SystemExit(launch.for_launcher(code)) from None


def _close_mirror(this: ThisRank, code: int) -> int:
    """The exit code of rank 0 of a run that is over, or was stopped: then it stays that of a stop,
    or a launcher would start the run again."""
    step = this.watch.step
    missing = mirrored.close(this.mirror, step)
    if missing is None or code == faults.STOPPED:
        return code
    run_status.write_status(this.directory, faults.NOT_MIRRORED, missing, step, True)
    return faults.NOT_MIRRORED


def _join(this: ThisRank, flags: Flags, signals: StopSignal) -> None:
    """Wait for all ranks, and set `this.directory` to rank 0's. Raises Fault; a problem of rank 0
    is raised on all ranks."""
    fabric, watch = this.fabric, this.watch
    nodes = os.environ.get("SLURM_STEP_NODELIST")
    if nodes is not None and launch.started_by_other() and "MASTER_ADDR" not in os.environ:
        # A task of srun. Lightning can read SLURM's lists of host names.
        os.environ["MASTER_ADDR"] = SLURMEnvironment.resolve_root_node_address(nodes)
    if watch.world_size > 1:
        signals.end_by(None)  # the watch hears them
        watch.join(flags.devices.join_timeout)
    try:
        failpoint("joining")
        if this.placement.kind == "cuda":
            _require_device(fabric.device)
        fabric.launch()
        failpoint("joined")
        this.rank = fabric.global_rank
        this.directory, problem = fabric.broadcast((this.directory, this.problem))
        # All ranks are told, so that none waits for rank 0.
        if problem is not None:
            raise problem
        # --code counts by its content: machines may have a file of the same name, but another one.
        _require_one_command(ranks.gather({**flags.flat(), "code": register.fact()}))
        _fetch_together(this, flags)
    except ValueError as error:
        raise as_mistake(error) from None
    # PyTorch raises it for all that goes wrong between ranks: the text tells the cause.
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise launch.port_in_use() from error
        fault = as_fault(error)
        if fault.code == faults.UNEXPECTED:
            raise
        raise Fault(f"another rank was lost before training began: {fault}", fault.code) from error
    world_size = this.placement.world_size
    assert fabric.world_size == world_size, (fabric.world_size, world_size)
    watch.begin(flags.devices.hang_timeout)
    signals.end_by(interrupt)  # the watch tells the others when this rank ends


def _require_device(device: torch.device) -> None:
    """Raises Fault (2) where a GPU computes nothing, as one that this PyTorch has no kernels for,
    or that another process keeps for itself. Otherwise each fast path would seem to fail there."""
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        fault = as_fault(error)
        if fault.code == faults.UNEXPECTED:  # else its own, such as memory
            name, [words, *_] = torch.cuda.get_device_name(device), str(error).splitlines()
            fault = Fault(
                f"{device} ({name}) computes nothing with PyTorch {torch.__version__}: "
                f"{words.rstrip('.')}."
            )
        raise fault from error


def _fetch_together(this: ThisRank, flags: Flags) -> None:
    """What may take minutes: begin to mirror, and fetch checkpoint and data. Raises Fault on all
    ranks."""

    def mark() -> None:
        this.watch.mark(0, "fetching")

    def open_mirror() -> None:
        # A process that meets no other has done so, before it started its ranks.
        if this.rank == 0 and this.mirror is None:
            this.mirror = mirrored.open_mirror(flags, this.directory)

    if flags.save.mirror is not None:
        this.ranks_apart = apart.find(this.directory, flags.devices.hang_timeout)
        mark()
        ranks.together(open_mirror, mark)
        if this.ranks_apart is not None:
            copies.require_seen(flags.save.mirror, this.ranks_apart, mark)
    ranks.together(lambda: checks.fetch_data(flags), mark)
    # Data at an address may change between the machines' looks at it.
    _require_one_command(ranks.gather({"train_data_dir as fetched": fetched.versions()}))


def _require_one_command(flags_of_ranks: list[dict[str, Any]]) -> None:
    """Raises Fault (2) where ranks have different flags: those of two jobs may have met at one
    address."""
    first = flags_of_ranks[0]
    for rank, own in enumerate(flags_of_ranks):
        for name in first:
            if own[name] != first[name]:
                ours = f"--{name} {json.dumps(own[name], default=str)}"
                others = f"--{name} {json.dumps(first[name], default=str)}"
                raise Fault(
                    f"rank {rank} was started with {ours}, rank 0 with {others}: start all with "
                    "one command."
                )


def _require_same_files(files_of_ranks: list[list[tuple[str, Any]]]) -> None:
    """Raises Fault (2) where machines have other data, or another model, at the same paths."""
    for rank, own in enumerate(files_of_ranks):
        for (name, fact), (_, own_fact) in zip(files_of_ranks[0], own):
            if own_fact != fact:
                raise Fault(
                    f"{name}: rank {rank} reads another version at this path than rank 0: copy one "
                    "to all machines."
                )


def _plan_together(this: ThisRank, flags: Flags) -> None:
    """Set `this.plan`, on all ranks. Raises the same Fault on all ranks."""
    # Rank 0 alone chooses and reads the checkpoint: it compares hashes, and other machines may not
    # see the newest yet, or the end of the log, which has the losses of an evaluation. To hash a
    # large one may take longer than --hang_timeout.
    mark = partial(this.watch.mark, 0, "comparing hashes")
    chosen = ranks.together(lambda: _checkpoint_to_resume(this, flags), mark)
    resume_from, resumed = ranks.from_first(chosen)
    place = copies.readable(
        flags.save.mirror, this.mirror, this.ranks_apart, this.watch, resume_from
    )
    # A plan may fail on one rank alone, such as for a file that only its machine lacks.
    problem = None
    try:
        plan = make_plan(flags, this.placement, this.directory, resume_from, resumed, place)
    except ValueError as error:
        problem = as_mistake(error)
    ranks.first_fault(problem)
    # One rank has nothing to compare, and hashing a large vocabulary takes time.
    if this.placement.world_size > 1:
        _require_same_files(ranks.gather(plan.files_read()))
    if this.rank == 0:
        for sentence in warnings_of(flags, plan):
            print(f"Warning: {sentence}", flush=True)
        if sentence := run_directory.unfinished_before(flags, plan.run_directory):
            print(f"Warning: {sentence}", flush=True)
        if parent := run_directory.created_parent(this.directory):
            print(f"Warning: {str(parent)!r} wasn't there and was made for --output_dir.")
    if _writes_status(this):
        run_status.write_status(plan.run_directory, None, "running", plan.start.step, True)
    this.plan = plan


def _checkpoint_to_resume(this: ThisRank, flags: Flags) -> tuple[Optional[Path], dict[str, Any]]:
    """(the checkpoint to resume from or None, its progress.json) on rank 0; nothing on others.
    Raises Fault, also where a new run would start from a damaged checkpoint."""
    path, document = None, {}
    if this.rank == 0:
        path = resumption.choose(flags, this.directory, partial(mirrored.mend, this.mirror))
        if path is not None:
            document = keep.verified(path)
        else:
            is_full = flags.checkpoint.verify_checkpoints == "full"
            require_whole(Path(flags.model.model_name), is_full)
    return path, document


def _end(
    this: ThisRank, flags: Flags, own: Fault, signals: StopSignal, is_stuck: bool = False
) -> int:
    """Tell the other ranks and the user why this rank ends. Returns its exit code.

    own: this rank's fault. is_stuck: the watching thread calls this, for a fault that it has seen
    or another rank has told.
    """
    first_rank, first = this.watch.report(own)
    if first.again:
        return _start_again(this, flags, first, signals)
    # A main thread that is stuck has no error of its own to tell.
    if is_stuck:
        own = first
    # Ranks that made the same mistake each exit with its code.
    is_first = first_rank == this.rank or str(first) == str(own)
    # The sentence about a lost rank names it already.
    if not is_first and first.code != faults.PEER_LOST:
        first = Fault(f"rank {first_rank}: {first}", first.code, first.retryable)
    _print_end(this.rank, own, first)
    if this.rank == 0 and this.plan is not None and first.code == faults.STOPPED:
        say_what_is_left(flags, this.plan.run_directory)
    _record_end(this, flags, first)
    this.children.end(SECONDS_FOR_OTHERS)

    # The rank that failed first exits with its own code. So does the process that started the
    # others, for its user.
    if is_first and not is_stuck:
        return own.code
    if first.code == faults.STOPPED or this.children.processes:
        return first.code
    return faults.PEER_LOST


def _start_again(this: ThisRank, flags: Flags, first: Fault, signals: StopSignal) -> int:
    """Start this rank's command once more with the flags of `first`.

    Returns an exit code on a rank that rank 0 of its machine has started, and starts again, and
    where a request to stop has come meanwhile.
    """
    if this.rank == 0:
        print(f"Warning: {first}", file=sys.stderr, flush=True)
        step = max(this.watch.step, this.plan.start.step)
        run_status.record_event(
            this.directory, "fell_back", step, reason=str(first), flags=first.again
        )
        # What is said of the run if the next attempt doesn't come so far.
        run_status.write_status(this.directory, first.code, str(first), step, True)
        if this.log is not None:
            this.log.close(SECONDS_FOR_OTHERS)
        # Rank 0 holds the store, from which the others hear that all start again.
        this.watch.wait_for(list(this.watch.beats), SECONDS_FOR_OTHERS)
    if launch.has_parent():
        return first.code
    this.children.end(SECONDS_FOR_OTHERS)
    if signals.is_to_stop():
        if this.rank == 0:
            stopped = at_start()
            _print_end(this.rank, stopped, stopped)
            run_status.write_fault(this.directory, stopped, step)
        return faults.STOPPED
    more = list(first.again)
    # The next attempt writes into the same directory.
    if not flags.checkpoint.resume and flags.checkpoint.run_name is None:
        more.append(f"--run_name={this.directory.name}")
    launch.start_again(more)


def _print_end(rank: int, own: Fault, first: Fault) -> None:
    """Print the first fault on rank 0. Another rank prints its own error, which only it has seen,
    or that rank 0 is lost."""
    # No error: the run that would be resumed is over.
    if first.code == faults.DONE:
        if is_rank_zero():
            print(first, flush=True)
        return
    # Ranks that end only because another one did say nothing: the user reads one sentence.
    message = None
    if rank == 0:
        message = f"error: {first}"
    elif own.code == faults.PEER_LOST and first.code == faults.PEER_LOST:
        message = f"rank {rank}: {first}"
    elif own.code in (faults.UNEXPECTED, faults.OUT_OF_MEMORY) or first.code == faults.PEER_LOST:
        message = f"rank {rank}: {own}"
    if message is not None:
        print(f"train.py: {message}", file=sys.stderr, flush=True)


def _writes_status(this: ThisRank) -> bool:
    """Whether this rank writes STATUS.json: rank 0 and, for the scripts of their own machines,
    ranks that don't see its disk."""
    return this.rank == 0 or this.ranks_apart is not None and this.ranks_apart.is_here


def _record_end(this: ThisRank, flags: Flags, first: Fault) -> None:
    """Write STATUS.json where `_writes_status`, or on another rank, if rank 0 is lost, frozen or
    never joined."""
    watch = this.watch
    if this.rank == 0 and this.plan is None:
        # Nothing was done in the run directory. While ranks are joining no plan can be wrong yet,
        # so the code of the fault alone says whether it is a mistake.
        run_directory.leave(first, has_plan=watch.is_joining)
    elif this.plan is None and _writes_status(this):
        run_status.record_fault(this.directory, first)
    elif _writes_status(this):
        run_status.write_fault(this.directory, first, watch.step)
    if this.rank == 0:
        # The store ends with rank 0, so it waits until the ranks that it has heard have read why.
        watch.wait_for(list(watch.beats), SECONDS_FOR_OTHERS)
    if _writes_status(this):
        return
    # Rank 0 has time to write the status itself, unless nothing can be heard of it any more.
    is_lost = watch.store_is_lost
    if not is_lost and first.code == faults.PEER_LOST:
        is_lost = not watch.wait_for([0], SECONDS_FOR_RANK_0)
    if this.plan is None and flags.save.mirror is not None and first.retryable:
        _write_elsewhere(this, flags, first)
    if is_lost:
        _write_for_rank_0(this, flags, first)
        # A rank 0 that is frozen holds its devices and would never end.
        if first.code != faults.STOPPED:
            launch.kill_parent()


def _write_elsewhere(this: ThisRank, flags: Flags, first: Fault) -> None:
    """Write STATUS.json on a machine that, as is not known yet, doesn't see rank 0's disk."""
    with suppress(ValueError, OSError):
        directory = this.directory or run_directory.directory(flags)
        # Where it is there, rank 0 has it. Another name may not be the one that rank 0 takes.
        if flags.checkpoint.run_name is not None and not directory.is_dir():
            directory.mkdir(parents=True)
            run_status.write_fault(directory, first, None)


def _write_for_rank_0(this: ThisRank, flags: Flags, first: Fault) -> None:
    """Write STATUS.json in place of rank 0, unless rank 0 has written why this run ends."""
    of_rank_0 = this.watch.beats.get(0, {})
    # Whatever goes wrong here mustn't hide why the run ended.
    with suppress(ValueError, OSError):
        directory = this.directory or run_directory.directory(flags)
        # Where rank 0 never came, it doesn't hold the lock.
        if not of_rank_0 and not launch.has_parent():
            run_directory.lock(directory)
        status = run_status.read_status(directory)
        # A status of another process is about an earlier start in this directory.
        is_written = status.get("code") is not None and status.get("pid") == of_rank_0.get("pid")
        if directory.is_dir() and not is_written:
            run_status.write_fault(directory, first, this.watch.step)


def _out_of_memory(this: ThisRank, fault: Fault) -> Fault:
    """`fault` with the peak of memory, what takes it, and what to change."""
    plan, watch, device, total = this.plan, this.watch, this.fabric.device, ""
    if device.type == "cuda":
        total = f" of {torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"
    return Fault(
        f"out of memory (rank {this.rank}, step {watch.step + 1}, {watch.doing}): peak "
        f"{peak_memory_gib(device):.1f} GiB{total}; a micro-batch is "
        f"{plan.schedule.micro_batch_size} x {plan.data.dataset.context_length} tokens, the model "
        f"{plan.placement.strategy} over {plan.placement.world_size} devices. Smaller: "
        "--micro_batch_size (with the same --global_batch_size), --activation_checkpointing true, "
        f"more --devices, --cpu_offload true. {str(fault)[:200].rstrip('.')}.",
        faults.OUT_OF_MEMORY,
    )
