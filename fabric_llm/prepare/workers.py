"""Have pieces encoded: in this process, by a process for each core, or by the machines of a Ray cluster.

A process imports the tokenizer's backend and numpy, takes one piece after the other from a pipe, and dies with this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fabric_llm.base.ending import die_with
from fabric_llm.base.faults import PEER_LOST, Fault
from fabric_llm.base.machine import cores
from fabric_llm.prepare.encoding import Job, encode_piece, load_backend
from fabric_llm.prepare.pieces import Piece

LITTLE_BYTES = 16 * 2**20  # of input, for which no process is started
SERVE = "from fabric_llm.prepare.workers import serve; serve()"
Report = Callable[[int], Any]


def encode_here(pieces: Sequence[Piece], job: Job, report: Report) -> None:
    """Encode in this process, on all cores that the tokenizer takes."""
    backend = load_backend(job.folder)
    for piece in pieces:
        encode_piece(piece, job._replace(threads=cores()), backend, report)


# ---------------------------------------------------------------------------- processes


def encode_locally(pieces: Sequence[Piece], job: Job, num_workers: int, report: Report) -> None:
    """Encode by processes on this machine. What one of them raises is raised here, and the others end."""
    count = min(num_workers, len(pieces))
    waiting = list(reversed(pieces))
    processes: dict[Connection, subprocess.Popen] = {}
    try:
        for _ in range(count):
            pipe, process = _start(job._replace(threads=max(1, num_workers // count)))
            processes[pipe] = process
            pipe.send(waiting.pop())
        while processes:
            for pipe in wait(list(processes)):
                _hear(pipe, processes, waiting, report)
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.wait()


def _hear(pipe: Connection, processes: dict, waiting: list[Piece], report: Report) -> None:
    try:
        kind, value = pipe.recv()
    except (EOFError, OSError):
        code = processes[pipe].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        memory = " (for want of memory?)" if code == -signal.SIGKILL else ""
        raise Fault(f"a process that tokenizes {how}{memory}; the same command goes on.", PEER_LOST) from None
    if kind == "bytes":
        report(value)
    elif kind == "failed":
        raise value
    elif waiting:
        pipe.send(waiting.pop())
    else:
        pipe.send(None)
        processes.pop(pipe).wait()


def _start(job: Job) -> tuple[Connection, subprocess.Popen]:
    ours, theirs = Pipe()
    package = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "true" if job.threads > 1 else "false",
        "RAYON_NUM_THREADS": str(job.threads),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-c", SERVE, str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    theirs.close()  # so that a process that dies closes the pipe
    ours.send(job)
    return ours, process


def serve() -> None:
    """A process: encodes what comes out of the pipe."""
    die_with(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of the terminal's group; the other process ends this one
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError, BrokenPipeError):
        job = pipe.recv()
        backend = load_backend(job.folder)
        while (piece := pipe.recv()) is not None:
            try:
                encode_piece(piece, job, backend, lambda count: pipe.send(("bytes", count)))
            except Exception as error:
                pipe.send(("failed", _sendable(error)))
                return
            pipe.send(("done", piece.number))


def _sendable(error: Exception) -> Exception:
    """A user's error as it is; of any other the traceback is printed here."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename) if error.errno else OSError(str(error))
    if isinstance(error, ValueError) and type(error) in (ValueError, Fault):
        return error
    traceback.print_exception(error)
    return RuntimeError(f"{type(error).__name__}: {error}")


# --------------------------------------------------------------------------------- Ray


def encode_on_ray(pieces: Sequence[Piece], job: Job, report: Report) -> None:
    """Encode each piece as a task of a Ray cluster, which shares the folders with this machine.

    The cluster is that of the environment (`RAY_ADDRESS`, `ray start`), else one of this machine alone.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--engine ray needs the package ray: pip install 'fabric_llm[ray]'") from None
    started = not ray.is_initialized()
    if started:
        package = str(Path(__file__).parents[2])
        ray.init(
            log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": package, "TOKENIZERS_PARALLELISM": "false"}}
        )
    try:
        task = ray.remote(num_cpus=1, max_retries=3)(_on_ray)
        given = ray.put(job)
        running = {task.remote(piece, given): piece for piece in pieces}
        while running:
            [ready], _ = ray.wait(list(running), num_returns=1)
            if (error := ray.get(ready)) is not None:
                raise error
            report(running.pop(ready).bytes)
    finally:
        if started:
            ray.shutdown()


def _on_ray(piece: Piece, job: Job) -> Any:
    """A user's error is returned: Ray would wrap it into one of its own."""
    try:
        encode_piece(piece, job, load_backend(job.folder), lambda count: None)
    except Exception as error:
        return _sendable(error)
    return None
