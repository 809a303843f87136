"""Heartbeats between ranks. A thread on each rank tells the others that it lives, and what it does.

A rank that dies closes its connections, which gloo notices and NCCL may not. A rank that hangs closes nothing. So each rank
puts a heartbeat into the process group's store and reads the others' there. A heartbeat says how many collectives the rank
has entered (base/ranks.py): the rank with the fewest is the one that the others wait for. The first fault of any rank is put
into the store as well. What the others then see, a broken connection, is a consequence, and they say whose fault came first.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

import torch

from fabric_llm.base.faults import PEER_LOST, Fault
from fabric_llm.base.ranks import waiting

MOST_SECONDS_BETWEEN_BEATS = 0.5
MOST_SECONDS_OF_SILENCE = 10.0  # of a rank that is alive but short of processor time
SECONDS_TO_ANSWER = 5.0  # for the store, before a rank that ends goes without
SECONDS_TO_TELL = 1.25  # who is silent, after a connection broke; and for the first fault to arrive
SECONDS_TO_END = 10.0  # for a rank's own way out, once another rank's fault is known


@dataclass
class Heard:
    """What one rank last heard of another."""

    beat: dict[str, Any]  # as published
    at: float  # monotonic seconds, when it last changed


class Watch:
    """Heartbeats of this rank and the others. `mark` says that work goes on, `report` that it ended.

    timeout_seconds: without a mark on this rank, or a beat of another, for so long, the run is taken to hang.
    on_fault(fault): called in the watching thread where the main thread can't act itself; ends the process.
    dead_child(): (rank, how it ended) of a process that this one started and that is gone, or None.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        on_fault: Callable[[Fault], None],
        dead_child: Callable[[], Optional[tuple[int, str]]] = lambda: None,
    ) -> None:
        self.rank, self.world_size, self.timeout_seconds = rank, world_size, timeout_seconds
        self.on_fault, self.dead_child = on_fault, dead_child
        self.step, self.doing, self.marked = 0, "setting up", time.monotonic()
        self.beats = 0
        self.heard: dict[int, Heard] = {}
        self.ended = threading.Event()
        self.interval = min(MOST_SECONDS_BETWEEN_BEATS, timeout_seconds / 10)
        self.patience = min(MOST_SECONDS_OF_SILENCE, timeout_seconds / 3)
        self.main_thread = threading.get_ident()
        self.claimed = threading.Lock()
        self.lost: set[int] = set()  # ranks that were given up
        self.store = Store(timeout_seconds + SECONDS_TO_TELL + 2 * self.interval)
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.thread.start()

    # ---------------------------------------------------------------- called by the main thread

    def mark(self, step: int, doing: str) -> None:
        """Work goes on: `step` finished steps, and what comes now."""
        self.step, self.doing, self.marked = step, doing, time.monotonic()

    def report(self, fault: Fault) -> tuple[int, Fault]:
        """Tell the others why this rank ends. Returns the fault that came first, and whose it is."""
        if not self._claim_end():
            threading.Event().wait()  # the watching thread is ending the process
        if fault.code == PEER_LOST:
            fault = self._first_after_a_while() or fault
        first_rank, first = self.store.put_first(self.rank, fault)
        self._set(f"ended/{self.rank}", "1")
        return first_rank, first

    def close(self) -> None:
        """The run is over; nobody is watched any more."""
        self._end()
        self._set(f"ended/{self.rank}", "1")
        self.thread.join(timeout=5)
        self.store.close()

    def wait_for_others(self, seconds: float) -> None:
        """Rank 0 holds the store: it leaves last, so that the others can read why."""
        deadline = time.monotonic() + seconds
        for rank in range(self.world_size):
            if rank != self.rank:
                self.wait_for(rank, deadline - time.monotonic())

    def wait_for(self, rank: int, seconds: float) -> bool:
        """True once `rank` has said that it ends; False if it hasn't in that time, or can't any more."""
        deadline = time.monotonic() + seconds
        while not self.has_ended(rank):
            if time.monotonic() > deadline or rank in self.lost or self.store.is_lost:
                return False
            time.sleep(0.05)
        return True

    def has_ended(self, rank: int) -> bool:
        """True if `rank` has said that it ends."""
        return self._get(f"ended/{rank}") is not None

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        self._beat()
        while not self.ended.wait(self.interval):
            self._beat()
            self._listen()
            fault = self._first() or self._lost_child() or self._lost_store() or self._hangs()
            if fault is not None:
                self._end_from_thread(self.store.put_first(self.rank, fault)[1])

    def _beat(self) -> None:
        self.beats += 1
        beat = {"beats": self.beats, "step": self.step, "doing": self.doing, "host": socket.gethostname()}
        beat |= {"pid": os.getpid(), "collectives": waiting.collectives, "still": time.monotonic() - self.marked}
        self._set(f"beat/{self.rank}", json.dumps(beat))

    def _listen(self) -> None:
        """Everyone listens to rank 0, and rank 0 to everyone: n reads, not n squared."""
        for rank in range(self.world_size) if self.rank == 0 else (0,):
            self._hear(rank)

    def _hear(self, rank: int) -> None:
        if rank == self.rank or (said := self._get(f"beat/{rank}")) is None:
            return
        beat, before = json.loads(said), self.heard.get(rank)
        if before is None or before.beat["beats"] != beat["beats"]:
            self.heard[rank] = Heard(beat, time.monotonic())

    def _is_still(self) -> bool:
        return time.monotonic() - self.marked >= self.timeout_seconds

    def _hangs(self) -> Optional[Fault]:
        if not self._is_still():
            return None
        # Nothing has moved here. Whoever is silent, or isn't waiting for the others, is the one they wait for.
        until = time.monotonic() + self.patience + self.interval
        while time.monotonic() < until:
            self._beat()  # the others may be listening for the same reason
            if (first := self._first()) is not None:
                return first
            for rank in range(self.world_size):
                self._hear(rank)
            time.sleep(self.interval)
            if not self._is_still():  # a job that was suspended goes on
                return None
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        silent = [rank for rank in others if rank not in self.heard or self._silence(rank) > self.patience]
        if silent:
            return self._silent_fault(silent[0])
        beats = {rank: heard.beat for rank, heard in self.heard.items()}
        beats[self.rank] = {"step": self.step, "doing": self.doing, "collectives": waiting.collectives}
        return hanging(beats, self.timeout_seconds)

    def _silent_fault(self, rank: int) -> Fault:
        self.lost.add(rank)
        if rank not in self.heard:
            return Fault(f"rank {rank} is lost or frozen: nothing was ever heard of it.", PEER_LOST)
        beat = self.heard[rank].beat
        return Fault(
            f"rank {rank} (process {beat['pid']} on {beat['host']}) is lost or frozen: silent for "
            f"{self._silence(rank):.1f} s, after step {beat['step']}, {beat['doing']}.",
            PEER_LOST,
        )

    def _lost_child(self) -> Optional[Fault]:
        child = self.dead_child()
        if child is None or self.has_ended(child[0]):
            return None
        rank, how = child
        self._hear(rank)
        beat = self.heard[rank].beat if rank in self.heard else {"step": self.step, "doing": "starting"}
        step = max(self.step, beat["step"])  # its last beat may be older than our last step together
        return Fault(f"rank {rank} {how} after step {step}, {beat['doing']}.", PEER_LOST)

    def _lost_store(self) -> Optional[Fault]:
        return self._silent_fault(0) if self.store.is_lost else None

    def _end_from_thread(self, first: Fault) -> None:
        """Give the main thread time to end by itself, which it does unless it is stuck; then end the process."""
        if not self._is_still() and self.ended.wait(SECONDS_TO_END):
            return
        if not self._claim_end():
            return
        print(f"Rank {self.rank} was here:\n{stack_of(self.main_thread)}", file=sys.stderr, flush=True)
        self._set(f"ended/{self.rank}", "1")
        self.on_fault(first)

    def _claim_end(self) -> bool:
        """True for the first thread that ends this rank."""
        self._end()
        return self.claimed.acquire(blocking=False)

    def _end(self) -> None:
        self.ended.set()
        self.store.patience_seconds = SECONDS_TO_ANSWER

    # ---------------------------------------------------------------- the store

    def _first_after_a_while(self) -> Optional[Fault]:
        """A connection broke: the fault of whoever broke it, or who is silent since."""
        deadline = time.monotonic() + SECONDS_TO_TELL
        while time.monotonic() < deadline:
            if (first := self._first() or self._lost_child()) is not None:
                return first
            self._beat()
            for rank in range(self.world_size):
                self._hear(rank)
            time.sleep(self.interval / 4)
        gone = [r for r in self.heard if self._silence(r) > 1.5 * self.interval and not self.has_ended(r)]
        return self._silent_fault(max(gone, key=self._silence)) if gone else None

    def _silence(self, rank: int) -> float:
        return time.monotonic() - self.heard[rank].at

    def _first(self) -> Optional[Fault]:
        self.store.hear_first()
        return self.store.first and self.store.first[1]

    def _set(self, key: str, value: str) -> None:
        self.store.ask(lambda store: store.set(key, value))

    def _get(self, key: str) -> Optional[str]:
        said = self.store.ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if said is None else said.decode()


def hanging(beats: dict[int, dict[str, Any]], seconds: float) -> Fault:
    """The fault of ranks that all live and don't get on: the one that has entered the fewest collectives hangs.

    beats: rank -> its heartbeat.
    """
    behind, *ahead = sorted(beats, key=lambda rank: (beats[rank]["collectives"], rank))
    beat = beats[behind]
    is_waited_for = bool(ahead) and beats[ahead[0]]["collectives"] > beat["collectives"]
    wait = "; the others wait for it" if is_waited_for else ""
    what = f"rank {behind} hangs: no progress for {seconds:.0f} s after step {beat['step']}"
    return Fault(f"{what}, {beat['doing']}{wait} (--hang_timeout).", PEER_LOST)


def stack_of(thread: int) -> str:
    """Where a thread of this process is."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)[-8:]) if frame is not None else "(no stack)"


class NoWatch:
    """In place of a Watch where nobody looks after a run, such as a notebook or a test."""

    step = 0

    def mark(self, step: int, doing: str) -> None:
        """Nobody listens."""
        self.step = step

    def close(self) -> None:
        """There is nothing to close."""


class Store:
    """The process group's store; one of this process where there is no group.

    Rank 0 holds it: it goes with rank 0, and where rank 0 is frozen no answer ever comes, not even to a connection. So it is
    asked in a thread of its own.
    """

    def __init__(self, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds  # for an answer
        self.is_lost = self.is_frozen = False
        self.first: Optional[tuple[int, Fault]] = None  # the first fault of the run, and whose it is
        self.thread = ThreadPoolExecutor(1, "store")
        self.store = store_of_group("watch")
        self.thread.submit(self._connect)

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """The answer; None, now and later, where the store is lost. Called by any thread."""
        if self.is_lost:
            return None
        try:
            return self.thread.submit(lambda: question(self.store)).result(self.patience_seconds)
        except TimeoutError:
            self.is_lost = self.is_frozen = True
        except RuntimeError:  # a broken connection, which collectives see as well
            self.is_lost = True
        return None

    def put_first(self, rank: int, fault: Fault) -> tuple[int, Fault]:
        """Put the fault of `rank` there, unless there is one. Returns whose came first."""
        mine = json.dumps({"rank": rank, "sentence": str(fault), "code": fault.code, "retryable": fault.retryable})
        self._remember(self.ask(lambda store: store.compare_set("first", "", mine)))
        return self.first or (rank, fault)

    def hear_first(self) -> None:
        """Keep the first fault, if there is one: rank 0 takes the store with it, and ends before those that are stuck."""
        self._remember(self.ask(lambda store: store.get("first") if store.check(["first"]) else None))

    def _remember(self, said: Union[bytes, str, None]) -> None:
        if said is not None:
            there = json.loads(said)
            self.first = there["rank"], Fault(there["sentence"], there["code"], there["retryable"])

    def close(self) -> None:
        """Nothing is asked any more."""
        self.is_lost = True
        self.thread.shutdown(wait=False)

    def _connect(self) -> None:
        self.store = self.store.clone()  # the group's own is locked while somebody waits for a key


def store_of_group(prefix: str) -> Any:
    """The process group's store, for keys that begin with `prefix`; one of this process where there is no group."""
    if not torch.distributed.is_initialized():
        return torch.distributed.HashStore()
    from torch.distributed.distributed_c10d import _get_default_store  # there is no public way to it

    return torch.distributed.PrefixStore(prefix, _get_default_store())
