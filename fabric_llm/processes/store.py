"""What the ranks tell each other beside the process group: heartbeats, and the first fault of the run.

They tell it to a store at the address where the process group has its own. Rank 0 or torchrun's agent holds it, so that it is
there before the ranks have joined, and goes with rank 0. Where rank 0 is frozen no answer ever comes, not even to a
connection. So one thread talks to the store, and may wait for ever; the other threads read what it has heard.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Optional

import torch
from torch.distributed import distributed_c10d

from fabric_llm.base.faults import Fault

SECONDS_TO_FIRST_WORDS = 0.1  # between two questions for a rank that hasn't been heard of: it may be frozen at any time
SECONDS_TO_ANSWER = 5.0  # for the store, before a rank that ends goes without


@dataclass
class Heard:
    """What this rank last heard of another."""

    beat: dict[str, Any]  # as published
    at: float  # monotonic seconds, when it last changed


class Store:
    """Rank 0 listens to all, the others to rank 0 and to `near`: n reads, not n squared. `hears_all` has them listen to all.

    make_beat(): this rank's heartbeat; it must never be the same twice. near: the ranks that this process has started.
    """

    def __init__(
        self, rank: int, world_size: int, make_beat: Callable[[], dict[str, Any]], near: Collection[int]
    ) -> None:
        self.rank, self.world_size, self.make_beat, self.near = rank, world_size, make_beat, near
        self.heard: dict[int, Heard] = {}
        self.first: Optional[tuple[int, Fault]] = None  # the first fault of the run, and whose it is
        self.own_fault: Optional[Fault] = None  # to be told, unless another one came first
        self.hears_all = rank == 0
        self.has_joined = False
        self.is_lost = False
        self.begun = self.done = 0  # exchanges
        self.begun_at = time.monotonic()
        self.interval = 0.0  # seconds between two of them
        self.woken, self.closed = threading.Event(), threading.Event()

    def start(self, timeout_seconds: float, door: Optional[socket.socket]) -> None:
        """Begin to talk. timeout_seconds: for a connection. door: listens on rank 0 where the ranks meet, if it's there."""
        self.timeout = timedelta(seconds=timeout_seconds)
        store = None if door is None else self._connect(door)  # before the process group wants the port
        threading.Thread(target=self._talk, args=[store], name="store", daemon=True).start()

    def knows_all(self) -> bool:
        """True once this rank has heard of those that it listens to."""
        return self.heard.keys() >= self._listened()

    def refresh(self, seconds: float = SECONDS_TO_ANSWER) -> bool:
        """Tell the store what there is to tell now, and hear what others have told it. False where it is lost.

        It is lost where it doesn't answer in that time, or never has before the ranks have joined.
        """
        begun, deadline = self.begun, time.monotonic() + seconds
        self.woken.set()
        while self.done <= begun and not self.is_lost:
            self.is_lost = time.monotonic() > deadline or not (self.done or self.has_joined)
            time.sleep(0.002)
        return not self.is_lost

    def put_first(self, fault: Fault) -> tuple[int, Fault]:
        """Tell a fault of this rank, unless there is one. Returns whose came first."""
        self.own_fault = fault
        self.refresh()
        return self.first or (self.rank, fault)

    def unanswered_seconds(self) -> float:
        """For how long the store owes an answer."""
        return time.monotonic() - self.begun_at if self.done < self.begun else 0.0

    def close(self) -> None:
        """Nothing is told or asked any more."""
        self.is_lost = True
        self.closed.set()
        self.woken.set()

    # ---------------------------------------------------------------- the thread

    def _talk(self, store: Optional[torch.distributed.Store]) -> None:
        while not self.closed.is_set():
            self.begun, self.begun_at = self.begun + 1, time.monotonic()
            try:
                store = store or self._connect()
                self._exchange(store)
                self.done = self.begun
            except (RuntimeError, ValueError):
                if self.has_joined:  # a broken connection, which collectives see as well
                    self.is_lost = True
                    return
                store = None  # nobody holds it yet, or any more; joining itself says what is wrong
                self.closed.wait(self.interval)
            self.woken.wait(self.interval if self.knows_all() else min(self.interval, SECONDS_TO_FIRST_WORDS))
            self.woken.clear()

    def _connect(self, door: Optional[socket.socket] = None) -> torch.distributed.Store:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # its store may be that of the attempt before
        if self.world_size == 1:
            return torch.distributed.HashStore()
        if torch.distributed.is_initialized():  # the group's own is locked while somebody waits for a key
            store = distributed_c10d._get_default_store().clone()  # there is no public way to it
            return torch.distributed.PrefixStore(f"watch-{attempt}", store)
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = torch.distributed.TCPStore(
            os.environ.get("MASTER_ADDR", "127.0.0.1"),  # as Lightning has it
            int(os.environ["MASTER_PORT"]),
            is_master=self.rank == 0 and not of_agent,
            timeout=self.timeout,
            wait_for_workers=False,
            multi_tenant=True,  # the process group's comes to the same address
            master_listen_fd=door.detach() if door is not None else None,
        )
        return torch.distributed.PrefixStore(f"watch-{attempt}", store)

    def _exchange(self, store: torch.distributed.Store) -> None:
        if self.own_fault is not None and self.first is None:  # before the beat that may say that this rank has ended
            told = {"rank": self.rank, "sentence": str(self.own_fault)}
            told |= {"code": self.own_fault.code, "retryable": self.own_fault.retryable}
            self._remember(store.compare_set("first", "", json.dumps(told)))
        store.set(f"beat/{self.rank}", json.dumps(self.make_beat()))
        for rank in self._listened():
            if store.check([f"beat/{rank}"]):
                beat, before = json.loads(store.get(f"beat/{rank}")), self.heard.get(rank)
                if before is None or before.beat != beat:
                    self.heard[rank] = Heard(beat, time.monotonic())
        if self.first is None and store.check(["first"]):
            self._remember(store.get("first"))

    def _listened(self) -> set[int]:
        return (set(range(self.world_size)) if self.hears_all else {0, *self.near}) - {self.rank}

    def _remember(self, said: bytes) -> None:
        """Rank 0 takes the store with it, and ends before ranks that are stuck."""
        there = json.loads(said)
        self.first = there["rank"], Fault(there["sentence"], there["code"], there["retryable"])
