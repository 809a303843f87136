"""Rendezvous: heartbeats between ranks until all have joined the process group. watch.py has those after it.

The process group can't say who is missing: it forms when all are there, or fails after its time-out. So each rank tells a
store that it lives until it has joined: the group's where there is one, else one at the same address, which rank 0 or
torchrun's agent holds. Rank 0 listens to all, the others to rank 0. A rank that isn't heard for `timeout_seconds` ends the
run.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from fabric_llm.base.faults import PEER_LOST, Fault
from fabric_llm.processes.launch import Children
from fabric_llm.processes.stop import at_start
from fabric_llm.processes.watch import MOST_SECONDS_BETWEEN_BEATS, Heard, store_of_group

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_OF_SLEEP = 5.0  # between two looks: this process was suspended, and the others may have been as well
SECONDS_TO_FIRST_WORDS = 0.1  # between two questions for a rank that hasn't been heard of: it may be frozen at any time
SECONDS_TO_MEET = 1.0  # before this rank joins: one that is lost later can be named with its host and process
SECONDS_TO_HEAR = 5.0  # for the others, why this rank goes
MOST_RANKS_NAMED = 8


class Meeting:
    """This rank among all that are to join.

    timeout_seconds: silence of a rank that is waited for, and time for all to connect once they are there.
    on_fault(fault): called in a thread, as the main thread waits; ends the process.
    children: the ranks that this process has started.
    is_asked(): True once a signal asks this process to stop.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        on_fault: Callable[[Fault], None],
        children: Children,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.world_size, self.on_fault, self.children = rank, world_size, on_fault, children
        self.is_asked = is_asked
        self.timeout_seconds = max(timeout_seconds, 1.0)
        self.words: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
        self.heard: dict[int, Heard] = {}
        self.store: Any = None  # if it is there before others look for it
        self.since = time.monotonic()  # silence counts from here on
        self.complete_since: Optional[float] = None  # all wait for each other
        self.answered = False  # by the store, ever
        self.news = threading.Event()  # there are words that the store hasn't
        self.told = threading.Event()  # it has them
        self.over = threading.Event()
        self.claimed = threading.Lock()

    # ---------------------------------------------------------------- called by the main thread

    def begin(self, directory: Optional[Path]) -> None:
        """This rank waits for the others. directory: rank 0's, that of the run. MASTER_PORT is in the environment."""
        self.since = time.monotonic()
        if self.children.door is not None:  # before the process group wants the port
            self.store = self._connect()
        self._say(directory=None if directory is None else str(directory))
        threading.Thread(target=self._talk, name="meeting", daemon=True).start()
        threading.Thread(target=self._look, name="join", daemon=True).start()
        deadline = time.monotonic() + SECONDS_TO_MEET
        while not self._knows_all() and time.monotonic() < deadline:
            time.sleep(0.02)
        # For the others to hear of this rank before it waits in the process group.
        time.sleep(2 * SECONDS_TO_FIRST_WORDS)

    def close(self) -> None:
        """All have joined, or this rank ends by itself."""
        if not self.over.is_set() and not self.claimed.acquire(blocking=False):
            threading.Event().wait()  # `on_fault` is ending the process
        self.over.set()
        self.news.set()

    def leave(self, fault: Fault) -> None:
        """Tell the others why this rank goes. Rank 0, which may hold the store, waits until they have heard it."""
        if self.over.is_set() or not self.answered:
            return
        self._say(ends={"sentence": str(fault), "code": fault.code, "retryable": fault.retryable})
        deadline = time.monotonic() + SECONDS_TO_HEAR
        self.told.wait(SECONDS_TO_HEAR)
        while self.rank == 0 and self._listening() > 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        self.over.set()

    def directory(self) -> Optional[str]:
        """Where the run of rank 0 is, if it has said so."""
        said = self.heard[0].beat.get("directory") if 0 in self.heard else None
        return said or self.words.get("directory")

    def has_ended(self, rank: int) -> bool:
        """True if `rank` has said that it ends."""
        return rank in self.heard and "ends" in self.heard[rank].beat

    def _knows_all(self) -> bool:
        """True once this rank has heard of those that it listens to."""
        return len(self.heard) >= (self.world_size - 1 if self.rank == 0 else 1)

    def _say(self, **words: Any) -> None:
        self.told.clear()
        self.words = {**self.words, **words}
        self.news.set()

    # ---------------------------------------------------------------- the thread that talks, and may wait for ever

    def _talk(self) -> None:
        interval, store = min(MOST_SECONDS_BETWEEN_BEATS, self.timeout_seconds / 10), self.store
        while not self.over.is_set():
            try:
                store = store or self._connect()
                self._exchange(store)
                self.answered = True
            except (RuntimeError, ValueError):  # nobody holds it yet, or any more; joining itself says what is wrong
                store = None
                self.over.wait(interval)
            self.news.wait(interval if self._knows_all() else SECONDS_TO_FIRST_WORDS)

    def _connect(self) -> Any:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # its store may be that of the attempt before
        if torch.distributed.is_initialized():
            return store_of_group(f"meeting-{attempt}").clone()
        door, self.children.door = self.children.door, None
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = torch.distributed.TCPStore(
            os.environ.get("MASTER_ADDR", "127.0.0.1"),  # as Lightning has it
            int(os.environ["MASTER_PORT"]),
            is_master=self.rank == 0 and not of_agent,
            timeout=timedelta(seconds=self.timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,  # the process group's comes to the same address
            master_listen_fd=door.detach() if door is not None else None,
        )
        return torch.distributed.PrefixStore(f"meeting-{attempt}", store)

    def _exchange(self, store: Any) -> None:
        self.news.clear()
        words = self.words
        store.set(str(self.rank), json.dumps({**words, "at": time.monotonic()}))
        if words is self.words:
            self.told.set()
        for rank in range(self.world_size) if self.rank == 0 else (0,):
            if rank != self.rank and store.check([str(rank)]):
                beat, before = json.loads(store.get(str(rank))), self.heard.get(rank)
                if before is None or before.beat != beat:
                    self.heard[rank] = Heard(beat, time.monotonic())

    # ---------------------------------------------------------------- the thread that judges

    def _look(self) -> None:
        last = time.monotonic()
        while not self.over.wait(SECONDS_BETWEEN_LOOKS):
            now = time.monotonic()
            if now - last > SECONDS_OF_SLEEP:
                self.since, self.complete_since = now, None
            last = now
            fault = self._asked() or self._dead_child() or self._last_words() or self._missing(now) or self._stuck(now)
            if fault is not None and self.claimed.acquire(blocking=False):
                self.on_fault(fault)

    def _asked(self) -> Optional[Fault]:
        return at_start() if self.is_asked() else None

    def _dead_child(self) -> Optional[Fault]:
        if (dead := self.children.dead()) is None:
            return None
        rank, how = dead
        said = self._last_words_of(rank)
        return said or Fault(f"rank {rank} {how} before training began.", self.children.code_of(rank))

    def _last_words(self) -> Optional[Fault]:
        return next(filter(None, map(self._last_words_of, sorted(list(self.heard)))), None)

    def _last_words_of(self, rank: int) -> Optional[Fault]:
        ends = self.heard[rank].beat.get("ends") if rank in self.heard else None
        return ends and Fault(f"rank {rank}: {ends['sentence']}", ends["code"], ends["retryable"])

    def _missing(self, now: float) -> Optional[Fault]:
        others = range(self.world_size) if self.rank == 0 else (0,)
        at = {rank: self.heard[rank].at if rank in self.heard else 0.0 for rank in others if rank != self.rank}
        silent = [rank for rank, heard in at.items() if now - max(heard, self.since) > self.timeout_seconds]
        if not silent:
            return None
        for_so_long = f"for {self.timeout_seconds:.0f} s (--join_timeout)"
        if known := [rank for rank in silent if rank in self.heard]:
            beat = self.heard[known[0]].beat
            who = f"rank {known[0]} (process {beat['pid']} on {beat['host']}) is lost or frozen: silent {for_so_long}"
            return Fault(f"{who}, before training began.", PEER_LOST)
        where = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT')}"
        heard = f"nothing was heard of {'them' if len(silent) > 1 else 'it'}" if self.answered else "nobody answers"
        verb = "haven't" if len(silent) > 1 else "hasn't"
        return Fault(f"{_named(silent)} {verb} joined: {heard} at {where} {for_so_long}.", PEER_LOST)

    def _stuck(self, now: float) -> Optional[Fault]:
        """Nobody is silent, and still there is no end."""
        if len(self.heard) < self.world_size - 1 or self._listening() < len(self.heard):
            return None
        self.complete_since = self.complete_since or now
        if self.rank != 0 or now - self.complete_since <= self.timeout_seconds:
            return None
        return Fault(
            f"all {self.world_size} ranks are there, but haven't connected to each other within "
            f"{self.timeout_seconds:.0f} s (--join_timeout): can their machines reach each other on the interface that "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names?",
            PEER_LOST,
        )

    def _listening(self) -> int:
        """How many other ranks live, and haven't said that they end as well."""
        now = time.monotonic()
        return sum(
            not self.has_ended(rank) and now - heard.at < 4 * MOST_SECONDS_BETWEEN_BEATS
            for rank, heard in list(self.heard.items())
        )


def _named(ranks: list[int]) -> str:
    """[1] -> 'rank 1', [1, 3] -> 'ranks 1 and 3'"""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - MOST_RANKS_NAMED
    words = [str(rank) for rank in ranks[:MOST_RANKS_NAMED]] + ([f"{more} more"] if more > 0 else [])
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
