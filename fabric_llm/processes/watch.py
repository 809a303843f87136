"""Who failed first: each rank watches the others, from before they join until the run ends.

The process group can't say who is missing: it forms when all are there, or fails after its time-out. Later a rank that dies
closes its connections, which gloo notices and NCCL may not, and a rank that hangs closes nothing. So each rank tells a store
that it lives (store.py), and a thread on each rank judges what it hears there. A heartbeat says how many collectives the rank
has entered (base/ranks.py): the rank with the fewest is the one that the others wait for. The first fault of any rank is put
into the store as well. What the others then see, a broken connection, is a consequence, and they say whose fault came first.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.faults import PEER_LOST, Fault
from fabric_llm.base.ranks import waiting
from fabric_llm.processes.launch import SECONDS_TO_END, Children
from fabric_llm.processes.stop import at_start
from fabric_llm.processes.store import SECONDS_TO_FIRST_WORDS, Store

MOST_SECONDS_BETWEEN_BEATS = 0.5
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_MEET = 1.0  # before this rank joins: one that is lost later can be named with its host and process
MOST_SECONDS_OF_SILENCE = 10.0  # of one that is short of processor time
SECONDS_TO_TELL = 1.25  # who is silent, after a connection broke; and for the first fault to arrive
MOST_RANKS_NAMED = 8


class Watch:
    """This rank among the others. `mark` says that work goes on, `report` that it ended.

    on_fault(fault): called in the watching thread where the main thread can't act itself; ends the process.
    children: the ranks that this process has started.
    is_asked(): True once a signal asks this process to stop; a rank that waits for others in C++ doesn't hear of it.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        on_fault: Callable[[Fault], None],
        children: Optional[Children] = None,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.world_size, self.on_fault = rank, world_size, on_fault
        self.children, self.is_asked = children or Children({}), is_asked
        self.directory: Optional[Path] = None  # of the run, on rank 0
        self.step, self.doing, self.marked = 0, "joining", time.monotonic()
        self.since = self.marked  # silence of a rank that hasn't been heard of counts from here on
        self.is_joining = False
        self.beats = 0
        self.main_thread = threading.get_ident()
        self.ended = threading.Event()
        self.says_end = False  # its heartbeat says that this rank ends
        self.claimed = threading.Lock()
        self.lost: set[int] = set()  # ranks that were given up
        self.store = Store(rank, world_size, self._beat, self.children.processes)
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # ---------------------------------------------------------------- called by the main thread

    def join(self, timeout_seconds: float, directory: Optional[Path]) -> None:
        """This rank waits for the others. MASTER_PORT is in the environment.

        timeout_seconds: silence of a rank that is waited for, and time for all to connect once they are there.
        directory: rank 0's, that of the run.
        """
        self.is_joining, self.directory = True, directory
        self._wait_at_most(max(timeout_seconds, 1.0))
        self._start()
        deadline = time.monotonic() + SECONDS_TO_MEET
        while not self.store.knows_all() and time.monotonic() < deadline:
            time.sleep(0.02)
        # For the others to hear of this rank before it waits in the process group.
        time.sleep(2 * SECONDS_TO_FIRST_WORDS)

    def begin(self, timeout_seconds: float) -> None:
        """All ranks have joined. Without a mark on this rank for `timeout_seconds`, the run is taken to hang."""
        self.mark(0, "setting up")
        self._wait_at_most(timeout_seconds)
        self.store.has_joined, self.is_joining = True, False
        if not self.thread.is_alive():
            self._start()

    def mark(self, step: int, doing: str) -> None:
        """Work goes on: `step` finished steps, and what comes now."""
        self.step, self.doing, self.marked = step, doing, time.monotonic()

    def claim_end(self) -> None:
        """This rank ends. Doesn't return where another thread is ending it already."""
        self.ended.set()
        if not self.claimed.acquire(blocking=False):
            threading.Event().wait()

    def report(self, fault: Fault) -> tuple[int, Fault]:
        """Tell the others why this rank ends. Returns the fault that came first, and whose it is."""
        if fault.code == PEER_LOST and self.store.own_fault is None:  # a consequence, which the main thread has seen
            fault = self._first_after_a_while() or fault
        self.says_end = True
        return self.store.put_first(fault)

    def close(self) -> None:
        """The run is over; nobody is watched any more."""
        self.ended.set()
        self.says_end = True
        self.store.refresh()
        self.store.close()
        self.thread.join(timeout=5)

    def wait_for_others(self, seconds: float) -> None:
        """Rank 0 holds the store: it leaves last, so that the others can read why."""
        deadline = time.monotonic() + seconds
        for rank in list(self.store.heard):
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
        return rank in self.store.heard and self.store.heard[rank].beat["ended"]

    # ---------------------------------------------------------------- the thread

    def _wait_at_most(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.patience = min(MOST_SECONDS_OF_SILENCE, timeout_seconds / 3)  # seconds of silence of a rank that is alive
        self.store.interval = min(MOST_SECONDS_BETWEEN_BEATS, timeout_seconds / 10)

    def _start(self) -> None:
        self.since = time.monotonic()
        door, self.children.door = self.children.door, None
        self.store.start(self.timeout_seconds, door)
        self.thread.start()

    def _run(self) -> None:
        while not self.ended.wait(SECONDS_BETWEEN_LOOKS):
            fault = self._asked() or self._first() or self._lost_child()
            fault = fault or self._missing() or self._lost_store() or self._hangs()
            if fault is not None:
                self._end_from_thread(self.store.put_first(fault)[1])

    def _beat(self) -> dict[str, Any]:
        self.beats += 1
        own = {"beats": self.beats, "host": socket.gethostname(), "pid": os.getpid(), "ended": self.says_end}
        return {**own, **self._progress(), "directory": self.directory and str(self.directory)}

    def _progress(self) -> dict[str, Any]:
        return {"step": self.step, "doing": self.doing, "collectives": waiting.collectives}

    def _asked(self) -> Optional[Fault]:
        return at_start() if self.is_joining and self.is_asked() else None

    def _first(self) -> Optional[Fault]:
        return self.store.first and self.store.first[1]

    def _lost_child(self) -> Optional[Fault]:
        child = self.children.dead()
        if child is None:
            return None
        rank, how = child
        self.store.refresh()  # it may have said why
        if self.store.first is not None or self.has_ended(rank):
            return self._first()
        if self.is_joining:
            return Fault(f"rank {rank} {how} before training began.", self.children.code_of(rank))
        beat = self.store.heard[rank].beat if rank in self.store.heard else {"step": self.step, "doing": "starting"}
        step = max(self.step, beat["step"])  # its last beat may be older than our last step together
        return Fault(f"rank {rank} {how} after step {step}, {beat['doing']}.", PEER_LOST)

    def _missing(self) -> Optional[Fault]:
        """Before the ranks have joined: the first that isn't heard, or isn't heard any more."""
        if not self.is_joining:
            return None
        awaited, heard = self._others() if self.rank == 0 else [0], self.store.heard
        last = {rank: heard[rank].at if rank in heard else self.since for rank in awaited}
        silent = [rank for rank in awaited if time.monotonic() - last[rank] > self.timeout_seconds]
        if not silent:
            return None
        for_so_long = f"for {self.timeout_seconds:.0f} s (--join_timeout)"
        if known := [rank for rank in silent if rank in heard]:
            return self._silent_fault(known[0], for_so_long)
        self.lost.update(silent)
        where = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT')}"
        heard_of, verb = ("them", "haven't") if len(silent) > 1 else ("it", "hasn't")
        answer = f"nothing was heard of {heard_of}" if self.store.done else "nobody answers"
        return Fault(f"{_named(silent)} {verb} joined: {answer} at {where} {for_so_long}.", PEER_LOST)

    def _lost_store(self) -> Optional[Fault]:
        """Once the ranks have joined: rank 0 has gone with it, or is frozen."""
        if self.is_joining:
            return None
        patience = self.timeout_seconds + SECONDS_TO_TELL + 2 * self.store.interval
        self.store.is_lost |= self.store.unanswered_seconds() > patience
        return self._silent_fault(0) if self.store.is_lost else None

    def _hangs(self) -> Optional[Fault]:
        """Nothing has moved here. Whoever is silent, or isn't waiting for the others, is the one they wait for."""
        if self.is_joining and (self.rank != 0 or not self.store.knows_all() or self._silent()):
            self.marked = time.monotonic()  # not all are there yet, and `_missing` says who isn't
        if not self._is_still():
            return None
        until = time.monotonic() + self.patience + self.store.interval
        self.store.hears_all = True
        while time.monotonic() < until:
            if (first := self._first()) is not None:
                return first
            time.sleep(self.store.interval)
            if not self._is_still():  # a job that was suspended goes on
                self.store.hears_all = self.rank == 0
                return None
        if silent := self._silent():
            return self._silent_fault(silent[0])
        if self.is_joining:
            return Fault(
                f"all {self.world_size} ranks are there, but haven't connected to each other within "
                f"{self.timeout_seconds:.0f} s (--join_timeout): can their machines reach each other on the interface that "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names?",
                PEER_LOST,
            )
        beats = {rank: self.store.heard[rank].beat for rank in self._others()}
        return hanging({**beats, self.rank: self._progress()}, self.timeout_seconds)

    def _is_still(self) -> bool:
        return time.monotonic() - self.marked >= self.timeout_seconds

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _silent(self) -> list[int]:
        """The other ranks that aren't heard, or haven't been for longer than a rank that lives."""
        heard = self.store.heard
        return [rank for rank in self._others() if rank not in heard or self._silence(rank) > self.patience]

    def _silence(self, rank: int) -> float:
        return time.monotonic() - self.store.heard[rank].at

    def _silent_fault(self, rank: int, for_so_long: Optional[str] = None) -> Fault:
        self.lost.add(rank)
        if rank not in self.store.heard:
            return Fault(f"rank {rank} is lost or frozen: nothing was ever heard of it.", PEER_LOST)
        beat = self.store.heard[rank].beat
        when = "before training began" if self.is_joining else f"after step {beat['step']}, {beat['doing']}"
        silent = f"silent {for_so_long or f'for {self._silence(rank):.1f} s'}"
        return Fault(
            f"rank {rank} (process {beat['pid']} on {beat['host']}) is lost or frozen: {silent}, {when}.", PEER_LOST
        )

    def _first_after_a_while(self) -> Optional[Fault]:
        """A connection broke: the fault of whoever broke it, or who is silent since."""
        deadline, interval = time.monotonic() + SECONDS_TO_TELL, self.store.interval
        self.store.hears_all = True
        while time.monotonic() < deadline:
            if (first := self._first() or self._lost_child()) is not None:
                return first
            self.store.woken.set()
            time.sleep(interval / 4)
        gone = [r for r in list(self.store.heard) if self._silence(r) > 1.5 * interval and not self.has_ended(r)]
        return self._silent_fault(max(gone, key=self._silence)) if gone else None

    def _end_from_thread(self, first: Fault) -> None:
        """Give the main thread time to end by itself, which it does unless it is stuck; then end the process."""
        is_stuck = self.is_joining or self._is_still()
        if not is_stuck and self.ended.wait(SECONDS_TO_END):
            return
        self.claim_end()
        if not self.is_joining:
            stack = traceback.format_stack(sys._current_frames()[self.main_thread])
            print(f"Rank {self.rank} was here:\n{''.join(stack[-8:])}", file=sys.stderr, flush=True)
        self.on_fault(first)


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


def _named(ranks: list[int]) -> str:
    """[1] -> 'rank 1', [1, 3] -> 'ranks 1 and 3'"""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - MOST_RANKS_NAMED
    words = [str(rank) for rank in ranks[:MOST_RANKS_NAMED]] + ([f"{more} more"] if more > 0 else [])
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
