"""Run a function in several real processes that form a gloo process group.

Ranks are forked from the test process, which has imported everything already: a start takes a tenth
of a second. No port can be taken: rank 0 gets a free one and writes it into a file. They always
destroy their process group.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable

import torch
from safetensors.torch import load_file


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120
) -> list[Any]:
    """[function(*args) on each rank]. With world_size 1 there is no process group, as in a plain
    `python train.py`.

    Raises AssertionError with the first failing rank's traceback and output. SystemExit counts as
    failure.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = [_fork(rank, world_size, folder, function, args) for rank in range(world_size)]
        statuses = _wait(pids, timeout_seconds)
        reports = [_report(folder, rank, status) for rank, status in enumerate(statuses)]
        if any(statuses):
            raise AssertionError(
                "\n".join(report for report, status in zip(reports, statuses) if status)
            )
        return [
            pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]


class Job:
    """`train.py FLAGS` on several ranks that may be killed; each ends with train.py's own exit
    code.

    codes: exit code of each rank once `wait` has returned, -9 for one that was killed. output: what
    each one said.
    """

    def __init__(
        self,
        world_size: int,
        *flags: Any,
        failpoint: str = "",
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """failpoint: see fabric_llm/failpoints.py. before: called in each rank before train.py's
        main."""
        argv = _argv(world_size, flags)
        self.folder = Path(tempfile.mkdtemp())
        self.pids = [
            _fork(rank, world_size, self.folder, _train_to_the_end, (argv, failpoint, before))
            for rank in range(world_size)
        ]
        self.codes: list[int] = []
        self.output: list[str] = []
        _wait_until_joined(self.folder, self.pids)

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL, for those of `ranks` that are still there."""
        for rank in ranks:
            if os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, timeout_seconds: float = 60) -> list[int]:
        """The codes. Raises AssertionError if a rank is still there after that time: it is killed
        then."""
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(statuses) < len(self.pids) and time.monotonic() < deadline:
            for pid in self.pids:
                if pid not in statuses and (done := os.waitpid(pid, os.WNOHANG))[0]:
                    statuses[pid] = done[1]
            time.sleep(0.005)
        left = [rank for rank, pid in enumerate(self.pids) if pid not in statuses]
        for rank in left:
            os.kill(self.pids[rank], signal.SIGABRT)  # faulthandler writes where each thread is
        time.sleep(1 if left else 0)
        for rank in left:
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        self.output = [
            _report(self.folder, rank, statuses.get(pid, -1)) for rank, pid in enumerate(self.pids)
        ]
        shutil.rmtree(self.folder)
        assert not left, f"ranks {left} did not end:\n" + "\n".join(self.output)
        self.codes = [os.waitstatus_to_exitcode(statuses[pid]) for pid in self.pids]
        return self.codes


def ended_with(codes: list[int], *flags: Any, **options: Any) -> Job:
    """A Job on so many ranks, which have ended with these codes."""
    job = Job(len(codes), *flags, **options)
    assert job.wait() == codes, job.output
    return job


def _wait_until_joined(folder: Path, pids: list[int], timeout_seconds: float = 60) -> None:
    """Without a launcher nobody would tell a rank in the rendezvous that the other was killed: it
    waits for its time-out.

    That is this harness's own affair: train.py begins after it.
    """
    deadline = time.monotonic() + timeout_seconds
    while len(list(folder.glob("joined-*"))) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.002)


def _train_to_the_end(argv: list[str], failpoint: str, before: Callable[[], None]) -> None:
    import train

    if failpoint:
        os.environ["FABRIC_LLM_FAILPOINT"] = failpoint
    before()
    code: Any = 0
    try:
        train.main(argv)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as train.py does


def _fork(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        faulthandler.enable(sys.stderr)
        torch.set_num_threads(1)  # makes torch's thread pool anew before threads race to do so
        if world_size > 1:
            join(rank, world_size, folder)
        (folder / f"joined-{rank}").touch()
        result = function(*args)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no atexit handlers of the test process


def join(rank: int, world_size: int, folder: Path) -> None:
    os.environ.update(  # what torchrun sets; Fabric then starts nothing itself
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="tests",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    store = _store(rank, folder / "port")
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _store(rank: int, file: Path) -> torch.distributed.Store:
    """Held by rank 0, as in a real run, at a port that the kernel gives it. (A frozen rank could
    keep a file's lock.)"""
    if rank == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        file.with_suffix(".part").write_text(str(store.port))
        file.with_suffix(".part").rename(file)
        return store
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    return torch.distributed.TCPStore(
        "127.0.0.1", int(file.read_text()), is_master=False, wait_for_workers=False
    )


def _wait(pids: list[int], timeout_seconds: float) -> list[int]:
    """Exit statuses; once one rank has failed the others get five seconds before they are
    killed."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses and (done := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = done[1]
                if done[1]:
                    deadline = min(deadline, time.monotonic() + 5)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
                    statuses[pid] = os.waitpid(pid, 0)[1]
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def _report(folder: Path, rank: int, status: int) -> str:
    output = folder / f"output-{rank}"
    text = output.read_text(errors="replace") if output.exists() else ""
    return f"--- rank {rank}, wait status {status} ---\n{text[-12_000:]}"


def train_ranks(world_size: int, *flags: Any, timeout_seconds: float = 120) -> None:
    """`train.py FLAGS` on `world_size` ranks, all of its code and real files."""
    import train

    argv = _argv(world_size, flags)
    run_ranks(world_size, train.main, argv, timeout_seconds=timeout_seconds)


def _argv(world_size: int, flags: Any) -> list[str]:
    return [*map(str, flags), "--devices", str(world_size), "--log_step_interval", "1"]


def planned(argv: Any) -> tuple[Any, Any]:
    """(arguments, plan) of `train.py ARGV`, on this rank alone."""
    from fabric_llm.plan import resumption, run_directory, start
    from fabric_llm.plan.make_plan import make_plan
    from parse_arguments import parse_train

    arguments = parse_train([str(word) for word in argv])
    directory = run_directory.directory(arguments)
    made = make_plan(
        arguments, start.place(arguments), directory, resumption.choose(arguments, directory)
    )
    return arguments, made


def started(argv: Any) -> Any:
    """The Run of `train.py ARGV` before its first step, without a run directory. All ranks call
    it."""
    from fabric_llm.model.strategy import make_fabric
    from fabric_llm.run.build import build_model, measure
    from fabric_llm.run.run import Run

    arguments, plan = planned(argv)
    fabric = make_fabric(plan.placement, plan.model.precision)
    fabric.launch()
    plan, loaded = measure(plan, arguments)
    run = Run(fabric, arguments, plan, None)
    build_model(run, loaded)
    return run


def built(argv: Any) -> tuple[Any, Any, Any, Any]:
    run = started(argv)
    return run.fabric, run.plan, run.model, run.optimizer


def elsewhere(folder: Path, ranks_a_machine: int = 1, moved: int = 0) -> Callable[[], None]:
    """Each machine has a disk of its own. moved: by so many places are machines other ones."""

    def change() -> None:
        own = folder / str((int(os.environ.get("RANK", "0")) // ranks_a_machine + moved) % 2)
        own.mkdir(exist_ok=True)
        os.chdir(own)

    return change


def instead(flags, more):
    """The flags, each with its value, in which those of `more` take the place of their own."""
    names = {str(word).partition("=")[0] for word in more}
    pairs = [
        pair for pair in zip(flags[::2], flags[1::2], strict=True) if str(pair[0]) not in names
    ]
    return (*(word for pair in pairs for word in pair), *more)


def toy_run(
    toys: Path, output: Path, *, model: str = "llama", data: str = "data"
) -> tuple[Any, ...]:
    """The flags of train.py that every run needs; `toys` is conftest's folder."""
    return ("--model_name", toys / model, "--train_data_dir", toys / data, "--output_dir", output)


def lines(run_directory: Path, key: str = "step") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have `key`, in order."""
    text = (run_directory / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if key in line]


def metrics(run_directory: Path, key: str = "loss") -> list[Any]:
    """The values of `key` in metrics.jsonl, in order."""
    return [line[key] for line in lines(run_directory, key)]


def status(run_directory: Path) -> dict[str, Any]:
    return json.loads((run_directory / "STATUS.json").read_text())


def saved(run_directory: Path) -> list[int]:
    """The steps of its checkpoints."""
    return sorted(int(path.name[5:]) for path in run_directory.glob("step-*") if path.is_dir())


def weights(run_directory: Path, step: int) -> dict[str, torch.Tensor]:
    """Those of a checkpoint with whole weights."""
    return load_file(run_directory / f"step-{step:08d}" / "model.safetensors")


def tensors(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    return {
        (str(path.relative_to(checkpoint)), name): value
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def assert_same_tensors(ours: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]) -> None:
    """To the last bit."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


REFUSE = """
import importlib.machinery, os, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):  # to look for a package is not to import it
        return importlib.machinery.ModuleSpec(name, self) if name in {names!r} else None

    def create_module(self, spec):
        said = [os.environ.get(variable) for variable in ("RANK", "WORLD_SIZE")]
        raise AssertionError("rank {{}} of {{}} imports {{}}".format(*said, spec.name))

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Refuse())
"""


def refuse_imports(folder: Path, names: tuple[str, ...]) -> str:
    """A PYTHONPATH of processes, and all that they start, in which an import of one of the `names`
    raises AssertionError."""
    site = folder / f"without-{names[0]}"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(REFUSE.format(names=names))
    return os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
