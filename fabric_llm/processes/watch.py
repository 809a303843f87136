"""Who failed first: each rank watches the others, from before they join until the run ends.

The process group can't say who is missing: it forms when all are there, or fails after its time-out. Later a rank that dies
closes its connections, which gloo notices and NCCL may not, and a rank that hangs closes nothing. So each rank tells a store
that it lives, at the address where the process group has its own, and a thread on each rank judges what it hears there. A
heartbeat says how many collectives the rank has entered (base/ranks.py): the rank with the fewest is the one that the others
wait for. The first fault of any rank is put into the store as well. What the others then see, a broken connection, is a
consequence, and they say whose fault came first.

Rank 0 or torchrun's agent holds the store, so that it is there before the ranks have joined, and goes with rank 0. Where
rank 0 is frozen no answer ever comes, not even to a connection. So one thread talks to the store, and may wait for ever.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import torch
from torch.distributed import distributed_c10d

from fabric_llm.base.faults import PEER_LOST, Fault
from fabric_llm.base.ranks import waiting
from fabric_llm.processes.launch import SECONDS_TO_END, Children
from fabric_llm.processes.stop import at_start

MOST_SECONDS_BETWEEN_BEATS = 0.5
SECONDS_BETWEEN_LOOKS = 0.2
MOST_SECONDS_BETWEEN_LOOKS = 5.0  # more were spent asleep, as in a job that was suspended, and count for nobody
SECONDS_TO_MEET = 1.0  # before this rank joins: one that is lost later can be named with its host and process
SECONDS_TO_FIRST_WORDS = 0.1  # between two questions for a rank that hasn't been heard of: it may be frozen at any time
SECONDS_TO_ANSWER = 5.0  # for the store, before a rank that ends goes without
MOST_SECONDS_OF_SILENCE = 10.0  # of one that is short of processor time
SECONDS_TO_TELL = 1.25  # who is silent, after a connection broke; and for the first fault to arrive


class Watch:
    """This rank among the others. `mark` says that work goes on, `report` that it ended.

    on_fault(fault): ends the process, from the watching thread, where the main thread can't act itself. children: the ranks
    that this process has started. is_asked(): whether a signal asks to stop; the main thread, in C++, doesn't hear of it.
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
        self.is_joining = self.has_joined = False
        self.step, self.doing, self.marked = 0, "joining", time.monotonic()
        self.main_thread = threading.get_ident()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.ended, self.claimed = threading.Event(), threading.Lock()
        self.says_end = False  # its heartbeat says that this rank ends
        # What this rank has heard from the store. Times are monotonic seconds.
        self.beats: dict[int, dict[str, Any]] = {}  # of other ranks
        self.heard_at: dict[int, float] = {}  # when these last changed
        self.first: Optional[tuple[int, Fault]] = None  # the first fault of the run, and whose it is
        self.own_fault: Optional[Fault] = None  # to be told, unless another one came first
        self.lost: set[int] = set()  # ranks that were given up
        self.store_is_lost = False
        self.hears_all = rank == 0  # the others hear rank 0 and those that they have started: n reads, not n squared
        self.begun = self.done = 0  # exchanges with the store
        self.begun_at = self.since = self.marked  # silence of a rank that hasn't been heard of counts from `since` on
        self.interval = MOST_SECONDS_BETWEEN_BEATS
        self.woken = threading.Event()

    def join(self, timeout_seconds: float, directory: Optional[Path]) -> None:
        """This rank waits for the others. MASTER_PORT is in the environment. directory: of the run, on rank 0.

        timeout_seconds: silence of a rank that is waited for, and time for all to connect once they are there.
        """
        self.is_joining, self.directory = True, directory
        self._start(max(timeout_seconds, 1.0))
        deadline = time.monotonic() + SECONDS_TO_MEET
        while self._unheard() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(2 * SECONDS_TO_FIRST_WORDS)  # in which the others hear of this rank, before it waits in the group

    def begin(self, timeout_seconds: float) -> None:
        """All ranks have joined. Without a mark on this rank for `timeout_seconds`, the run is taken to hang."""
        self.mark(0, "setting up")
        self.is_joining, self.has_joined = False, True
        self._start(timeout_seconds)

    def mark(self, step: int, doing: str) -> None:
        """Work goes on: `step` finished steps, and what comes now."""
        self.step, self.doing, self.marked = step, doing, time.monotonic()
        self.hears_all = self.rank == 0

    def claim_end(self) -> None:
        """This rank ends. Doesn't return where another thread is ending it already."""
        self.ended.set()
        if not self.claimed.acquire(blocking=False):
            threading.Event().wait()

    def report(self, fault: Fault) -> tuple[int, Fault]:
        """Tell the others why this rank ends. Returns the fault that came first, and whose it is."""
        if fault.code == PEER_LOST and self.own_fault is None:
            # A connection broke: the fault is that of whoever broke it, or who is silent since.
            deadline, cause = time.monotonic() + SECONDS_TO_TELL, None
            self.hears_all = True
            while cause is None and time.monotonic() < deadline:
                self.woken.set()
                time.sleep(self.interval / 4)
                cause = self._told()
            gone = [r for r in list(self.beats) if self._silence(r) > 1.5 * self.interval and not self._has_ended(r)]
            if cause is None and gone:
                cause = self._silent(max(gone, key=self._silence))
            fault = cause or fault
        self.says_end = True
        return self.put_first(fault)

    def put_first(self, fault: Fault) -> tuple[int, Fault]:
        """Tell a fault of this rank, unless there is one. Returns whose came first."""
        self.own_fault = fault
        self.refresh()
        return self.first or (self.rank, fault)

    def wait_for(self, ranks: Collection[int], seconds: float) -> bool:
        """Wait until `ranks` have said that they end, or can't any more. True if all have said so in that time."""
        deadline = time.monotonic() + seconds
        while left := [rank for rank in ranks if not self._has_ended(rank)]:
            if time.monotonic() > deadline or self.lost.issuperset(left) or self.store_is_lost:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """This rank has ended; nobody is watched any more."""
        self.ended.set()
        self.says_end = True
        self.refresh()
        self.store_is_lost = True
        self.woken.set()

    def _start(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.patience = min(MOST_SECONDS_OF_SILENCE, timeout_seconds / 3)  # seconds of silence of a rank that is alive
        self.interval = min(MOST_SECONDS_BETWEEN_BEATS, timeout_seconds / 10)
        if not self.thread.is_alive():
            self.since = time.monotonic()
            # Where this process listens at the port already, before the process group wants it.
            store = self._connect() if self.children.door is not None else None
            threading.Thread(target=self._talk, args=[store], name="store", daemon=True).start()
            self.thread.start()

    def _talk(self, store: Optional[torch.distributed.Store]) -> None:
        while not self.store_is_lost:
            self.begun, self.begun_at = self.begun + 1, time.monotonic()
            try:
                store = store or self._connect()
                self._exchange(store)
                self.done = self.begun
            except (RuntimeError, ValueError):
                store = None  # nobody holds it yet, or any more; joining itself says what is wrong
                if self.has_joined:  # a broken connection, which collectives see as well
                    self.store_is_lost = True
            self.woken.wait(min(self.interval, SECONDS_TO_FIRST_WORDS) if self._unheard() else self.interval)
            self.woken.clear()

    def _connect(self) -> torch.distributed.Store:
        if self.world_size == 1:
            return torch.distributed.HashStore()
        if torch.distributed.is_initialized():  # the group's own is locked while somebody waits for a key
            store = distributed_c10d._get_default_store().clone()  # there is no public way to it
        else:
            door, self.children.door = self.children.door, None
            of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            store = torch.distributed.TCPStore(
                os.environ.get("MASTER_ADDR", "127.0.0.1"),  # as Lightning has it
                int(os.environ["MASTER_PORT"]),
                is_master=self.rank == 0 and not of_agent,
                timeout=timedelta(seconds=self.timeout_seconds),
                wait_for_workers=False,
                multi_tenant=True,  # the process group's comes to the same address
                master_listen_fd=None if door is None else door.detach(),
            )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store may be that of the attempt before
        return torch.distributed.PrefixStore(f"watch-{attempt}", store)

    def _exchange(self, store: torch.distributed.Store) -> None:
        if (own := self.own_fault) is not None:  # before the beat that may say that this rank has ended
            told = {"rank": self.rank, "sentence": str(own), "code": own.code, "retryable": own.retryable}
            store.compare_set("first", "", json.dumps(told))
        if self.first is None and store.check(["first"]):  # remembered, since rank 0 takes the store with it
            there = json.loads(store.get("first"))
            self.first = there["rank"], Fault(there["sentence"], there["code"], there["retryable"])
        store.set(f"beat/{self.rank}", json.dumps(self._beat()))
        for rank in self._listened():
            beat = json.loads(store.get(f"beat/{rank}")) if store.check([f"beat/{rank}"]) else None
            if beat != self.beats.get(rank):
                self.beats[rank], self.heard_at[rank] = beat, time.monotonic()

    def _beat(self) -> dict[str, Any]:
        own = {"at": time.monotonic(), "host": socket.gethostname(), "pid": os.getpid(), "ended": self.says_end}
        own |= {"step": self.step, "doing": self.doing, "collectives": waiting.collectives}
        return {**own, "directory": self.directory and str(self.directory)}

    def _listened(self) -> set[int]:
        return (set(range(self.world_size)) if self.hears_all else {0, *self.children.processes}) - {self.rank}

    def _unheard(self) -> set[int]:
        return self._listened() - self.beats.keys()

    def refresh(self, seconds: float = SECONDS_TO_ANSWER) -> None:
        """Tell and hear now. The store is lost where it doesn't answer in that time, or never has before the ranks joined."""
        begun, deadline = self.begun, time.monotonic() + seconds
        self.woken.set()
        while self.done <= begun and not self.store_is_lost:
            if time.monotonic() > deadline or not (self.done or self.has_joined):
                self.store_is_lost = True
            time.sleep(0.002)

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self.ended.wait(SECONDS_BETWEEN_LOOKS):
            asleep = time.monotonic() - looked_at - MOST_SECONDS_BETWEEN_LOOKS
            if asleep > 0:
                self.marked, self.since, self.begun_at = (t + asleep for t in (self.marked, self.since, self.begun_at))
                self.heard_at = {rank: at + asleep for rank, at in list(self.heard_at.items())}
            looked_at = time.monotonic()
            fault = self._told() or self._seen()
            if fault is None or self.ended.is_set():  # the main thread ends by itself
                continue
            first = self.put_first(fault)[1]
            # The main thread has time to end by itself, which it does unless it is stuck.
            if not self.is_joining and not self._is_still() and self.ended.wait(SECONDS_TO_END):
                return
            self.claim_end()
            if not self.is_joining:
                stack = traceback.format_stack(sys._current_frames()[self.main_thread])
                print(f"Rank {self.rank} was here:\n{''.join(stack[-8:])}", file=sys.stderr, flush=True)
            self.on_fault(first)

    def _told(self) -> Optional[Fault]:
        """Why this rank must end, if somebody says it: a signal, the store, or the kernel of a rank that this one started."""
        if self.is_joining and self.is_asked():
            return at_start()
        dead = self.children.dead() if self.first is None else None
        if dead is not None:
            self.refresh()  # it may have said why
        if self.first is not None:
            return self.first[1]
        if dead is None or self._has_ended(dead[0]):
            return None
        rank, how, code = dead
        if self.is_joining:
            return Fault(f"rank {rank} {how} before training began.", code)
        beat = self.beats.get(rank, {"step": 0, "doing": "starting"})
        step = max(self.step, beat["step"])  # its last beat may be older than our last step together
        return Fault(f"rank {rank} {how} after step {step}, {beat['doing']}.", PEER_LOST)

    def _seen(self) -> Optional[Fault]:
        """Who is missing, lost or frozen, or hangs, as far as it shows by silence; None where all is well."""
        if self.is_joining:
            limit = f"{self.timeout_seconds:.0f} s (--join_timeout)"
            awaited = sorted(self._listened() if self.rank == 0 else {0})
            silence = {rank: self._silence(rank) for rank in awaited}
            gone = [rank for rank in awaited if silence[rank] > self.timeout_seconds]
            if known := [rank for rank in gone if rank in self.beats]:
                return self._silent(known[0], limit)
            if gone:
                self.lost.update(gone)
                who = f"rank {gone[0]}" + f" (and {len(gone) - 1} more, up to rank {gone[-1]})" * (len(gone) > 1)
                where = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT')}"
                answer = "nothing was heard of it" if self.done else "nobody answers"
                return Fault(f"{who} hasn't joined: {answer} at {where} for {limit}.", PEER_LOST)
            if self.rank != 0 or self._unheard() or max(silence.values(), default=0.0) > self.patience:
                self.marked = time.monotonic()  # not all are there yet
            apart = f"all ranks are there, but haven't connected to each other within {limit}: can their machines reach each "
            apart += "other on the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names?"
            return Fault(apart, PEER_LOST) if self._is_still() else None

        # Rank 0 has gone with the store, or is frozen.
        unanswered = time.monotonic() - self.begun_at if self.done < self.begun else 0.0
        if self.store_is_lost or unanswered > self.timeout_seconds + SECONDS_TO_TELL + 2 * self.interval:
            self.store_is_lost = True
            return self._silent(0)

        # Nothing has moved here. Whoever is silent, or isn't waiting for the others, is the one they wait for.
        if self._is_still():
            self.hears_all = True
        if not self._is_still(self.patience + self.interval):  # in which a rank that lives is heard
            return None
        if gone := [rank for rank in sorted(self._listened()) if self._silence(rank) > self.patience]:
            return self._silent(gone[0])
        return hanging({**self.beats, self.rank: self._beat()}, self.timeout_seconds)

    def _is_still(self, more_seconds: float = 0.0) -> bool:
        return time.monotonic() - self.marked >= self.timeout_seconds + more_seconds

    def _silence(self, rank: int) -> float:
        return time.monotonic() - self.heard_at.get(rank, self.since)

    def _has_ended(self, rank: int) -> bool:
        return rank in self.beats and self.beats[rank]["ended"]

    def _silent(self, rank: int, limit: str = "") -> Fault:
        """Of a rank that is given up. limit: what it was silent for, if not for so long as it is silent."""
        self.lost.add(rank)
        if rank not in self.beats:
            return Fault(f"rank {rank} is lost or frozen: nothing was ever heard of it.", PEER_LOST)
        beat, silent = self.beats[rank], limit or f"{self._silence(rank):.1f} s"
        when = "before training began" if self.is_joining else f"after step {beat['step']}, {beat['doing']}"
        who = f"rank {rank} (process {beat['pid']} on {beat['host']})"
        return Fault(f"{who} is lost or frozen: silent for {silent}, {when}.", PEER_LOST)


def hanging(beats: dict[int, dict[str, Any]], seconds: float) -> Fault:
    """The fault of ranks that all live and don't get on: the one that has entered the fewest collectives hangs.

    beats: rank -> its heartbeat.
    """
    behind, *ahead = sorted(beats, key=lambda rank: (beats[rank]["collectives"], rank))
    beat = beats[behind]
    wait = "; the others wait for it" if ahead and beats[ahead[0]]["collectives"] > beat["collectives"] else ""
    since = f"after step {beat['step']}, {beat['doing']}{wait}"
    return Fault(f"rank {behind} hangs: no progress for {seconds:.0f} s {since} (--hang_timeout).", PEER_LOST)
