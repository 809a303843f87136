"""Which rank failed first: each rank watches the others, from before they join until the run ends.

The process group can't say which rank is missing: it forms when all are there, or fails after its
time-out. Later a rank that dies closes its connections, which gloo notices and NCCL may not, and a
rank that hangs closes none. So each rank writes heartbeats into a store, at the address of the
process group's own, and a thread on each rank judges those that it reads there. A heartbeat has the
number of collectives that the rank has entered (base/ranks.py): the others wait for the rank with
the smallest number. The first fault of any rank is written there, too. Other ranks then see a
broken connection, which is its consequence, and say whose fault came first.

Rank 0 or torchrun's agent holds the store, so it exists before the ranks have joined, and may end
with rank 0. While rank 0 is frozen, no request to the store returns. So a thread of its own talks
to the store, and may wait for ever.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Optional

import torch
from torch.distributed import distributed_c10d

from fabric_llm.base.faults import PEER_LOST, STOPPED, Fault
from fabric_llm.base.program import wait_until
from fabric_llm.base.ranks import waiting
from fabric_llm.processes.launch import AGENT_STORE, SECONDS_TO_END, Children
from fabric_llm.processes.stop import at_start

MAX_SECONDS_BETWEEN_BEATS = 0.5
SECONDS_BETWEEN_LOOKS = 0.2
# After a longer time the job was suspended, which isn't held against any rank.
MAX_SECONDS_BETWEEN_LOOKS = 5.0
# Ranks hear of each other in this time before they join, so that a lost one can be named.
SECONDS_TO_MEET = 1.0
SECONDS_TO_FIRST_WORDS = 0.1  # between beats until all ranks have been heard of
SECONDS_TO_ANSWER = 5.0  # for the store, before a rank that ends gives it up
MAX_SECONDS_OF_SILENCE = 10.0  # of a rank that lives, but is short of processor time
# After a connection broke: to hear of the fault that broke it, or see who is silent.
SECONDS_TO_TELL = 1.25
SECONDS_TO_STOP = 0.5  # for the main thread, once another rank has told of a second signal


class Watch:
    """Watches the other ranks for this one, and tells them of this one. `mark` says that work goes
    on, `report` that it ended.

    on_fault(fault): called in the watching thread to end the process, if the main thread doesn't.
    children: the ranks that this process has started. is_asked(): whether a signal asks to stop,
    for the time in which the main thread is in C++.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        on_fault: Callable[[Fault], None],
        children: Children,
        is_asked: Callable[[], bool],
    ) -> None:
        self.rank, self.world_size, self.on_fault = rank, world_size, on_fault
        self.children, self.is_asked = children, is_asked
        self.is_joining = True  # until all ranks have joined
        self.step, self.doing, self.marked = 0, "joining", time.monotonic()
        self.collectives = 0  # that this rank had entered when the watch last looked
        self.main_thread = threading.get_ident()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.ended, self.claimed = threading.Event(), threading.Lock()
        self.says_end = False  # whether its heartbeat says that this rank ends
        # What this rank has heard from the store. Times are monotonic seconds.
        self.beats: dict[int, dict[str, Any]] = {}  # of other ranks
        self.heard_at: dict[int, float] = {}  # when these last changed
        # The rank whose fault came first, and that fault.
        self.first: Optional[tuple[int, Fault]] = None
        self.own_fault: Optional[Fault] = None  # to be told, unless another rank's came first
        self.lost: set[int] = set()  # ranks that this one has given up
        self.store_is_lost = False
        # The others hear rank 0 and those that they have started: n reads of the store, not n
        # squared.
        self.hears_all = rank == 0
        self.begun = self.done = 0  # number of exchanges with the store
        # The silence of a rank that was never heard of counts from `since`.
        self.begun_at = self.since = self.marked
        self.interval = MAX_SECONDS_BETWEEN_BEATS
        self.woken = threading.Event()

    def join(self, timeout_seconds: float) -> None:
        """Begin to watch while this rank waits for the others. MASTER_PORT is in the environment.

        timeout_seconds: longest silence of a rank that is waited for, and time for all to connect
        once they are there.
        """
        self._start(max(timeout_seconds, 1.0))
        wait_until(lambda: not self._unheard(), SECONDS_TO_MEET, 0.02)
        # The others are to hear of this rank before it joins.
        time.sleep(2 * SECONDS_TO_FIRST_WORDS)

    def begin(self, timeout_seconds: float) -> None:
        """All ranks have joined. From now on the run hangs if this rank isn't marked for
        `timeout_seconds`."""
        self.mark(0, "setting up")
        self.is_joining = False
        self._start(timeout_seconds)

    def mark(self, step: int, doing: str) -> None:
        """Work goes on: `step` steps are finished, and `doing` comes now."""
        self.step, self.doing, self.marked = step, doing, time.monotonic()
        # A rank that went without progress had begun to hear all others, see `_seen`.
        self.hears_all = self.rank == 0

    def claim_end(self) -> None:
        """To be called by the thread that ends this rank. Never returns if another thread is ending
        it already."""
        self.ended.set()
        # Waits for ever: the other thread ends the whole process.
        if not self.claimed.acquire(blocking=False):
            threading.Event().wait()

    def report(self, fault: Fault) -> tuple[int, Fault]:
        """Tell the others why this rank ends. Returns the rank whose fault came first, and that
        fault."""
        if fault.code == PEER_LOST and self.own_fault is None:
            # A connection broke: look for the fault of the rank that broke it, or for a rank that
            # is silent since.
            self.hears_all = True

            def told() -> Optional[Fault]:
                self.woken.set()
                return self._told()

            cause = wait_until(told, SECONDS_TO_TELL, self.interval / 4)
            gone = [
                r
                for r in list(self.beats)
                if self._silence(r) > 1.5 * self.interval and not self._has_ended(r)
            ]
            if cause is None and gone:
                cause = self._silent(max(gone, key=self._silence))
            fault = cause or fault
        self.says_end = True
        return self.put_first(fault)

    def put_first(self, fault: Fault) -> tuple[int, Fault]:
        """Tell a fault of this rank, unless another came first. Returns as `report`."""
        self.own_fault = fault
        self.refresh()
        return self.first or (self.rank, fault)

    def wait_for(self, ranks: Collection[int], seconds: float) -> bool:
        """Wait until `ranks` have said that they end, or can no longer say it. True if all have
        said so in time."""

        def left() -> set[int]:
            return {rank for rank in ranks if not self._has_ended(rank)}

        wait_until(lambda: left() <= self.lost or self.store_is_lost, seconds)
        return not left()

    def close(self) -> None:
        """This rank has ended: stop watching."""
        self.ended.set()
        self.says_end = True
        self.refresh()
        self.store_is_lost = True
        self.woken.set()

    def _start(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        # A rank that lives is silent for fewer seconds.
        self.patience = min(MAX_SECONDS_OF_SILENCE, timeout_seconds / 3)
        self.interval = min(MAX_SECONDS_BETWEEN_BEATS, timeout_seconds / 10)
        # `begin` comes here once more, for its own time-out, while the threads run.
        if not self.thread.is_alive():
            self.since = time.monotonic()
            # If this process holds the door, the store must take it over before the process group
            # wants the port.
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
                store = None  # before the ranks have joined, it may not be there yet
                if not self.is_joining:  # a broken connection, which collectives notice, too
                    self.store_is_lost = True
            pause = self.interval
            if self._unheard():
                pause = min(pause, SECONDS_TO_FIRST_WORDS)
            self.woken.wait(pause)
            self.woken.clear()

    def _connect(self) -> torch.distributed.Store:
        if self.world_size == 1:
            # Nobody else reads it, but the watch of one rank finds that it hangs as well.
            return torch.distributed.HashStore()
        if torch.distributed.is_initialized():  # the group's own is locked while it waits for a key
            store = distributed_c10d._get_default_store().clone()  # there is no public way to it
        else:
            door, self.children.door = self.children.door, None
            of_agent = os.environ.get(AGENT_STORE) == "True"
            store = torch.distributed.TCPStore(
                os.environ.get("MASTER_ADDR", "127.0.0.1"),  # Lightning's default
                int(os.environ["MASTER_PORT"]),
                is_master=self.rank == 0 and not of_agent,
                timeout=timedelta(seconds=self.timeout_seconds),
                wait_for_workers=False,
                multi_tenant=True,  # the process group's store will be at the same address
                master_listen_fd=None if door is None else door.detach(),
            )
        # torchrun may keep the store of the former attempt.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return torch.distributed.PrefixStore(f"watch-{attempt}", store)

    def _exchange(self, store: torch.distributed.Store) -> None:
        own = self.own_fault
        if own is not None:  # told before the beat that says that this rank has ended
            told = {
                "rank": self.rank,
                "sentence": str(own),
                "code": own.code,
                "retryable": own.retryable,
                "again": own.again,
            }
            # compare_set writes where there is nothing yet, so that the first fault stays.
            store.compare_set("first", "", json.dumps(told))
        # It is remembered, since the store may end with rank 0.
        if self.first is None and store.check(["first"]):
            there = json.loads(store.get("first"))
            rank = there.pop("rank")
            self.first = rank, Fault(**there)
        store.set(f"beat/{self.rank}", json.dumps(self._beat()))
        for rank in self._listened():
            key = f"beat/{rank}"
            if store.check([key]) and (beat := json.loads(store.get(key))) != self.beats.get(rank):
                self.beats[rank], self.heard_at[rank] = beat, time.monotonic()

    def _beat(self) -> dict[str, Any]:
        return {
            "at": time.monotonic(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ended": self.says_end,
            "step": self.step,
            "doing": self.doing,
            "collectives": waiting.collectives,
            "still": time.monotonic() - self.marked,
        }

    def _listened(self) -> set[int]:
        """The ranks whose heartbeats this one reads."""
        heard = {0, *self.children.processes}
        if self.hears_all:
            heard = set(range(self.world_size))
        return heard - {self.rank}

    def _unheard(self) -> set[int]:
        return self._listened() - self.beats.keys()

    def refresh(self) -> None:
        """Exchange with the store now. It is lost if it doesn't answer in time, or has never
        answered before the ranks joined."""
        # The exchange that is under way may have begun before what is to be told was known, so the
        # one after it is waited for.
        begun, deadline = self.begun, time.monotonic() + SECONDS_TO_ANSWER
        self.woken.set()
        while self.done <= begun and not self.store_is_lost:
            if time.monotonic() > deadline or self.is_joining and not self.done:
                self.store_is_lost = True
            time.sleep(0.002)

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self.ended.wait(SECONDS_BETWEEN_LOOKS):
            # A suspended job wakes up with old times, which say nothing of the other ranks.
            asleep = time.monotonic() - looked_at - MAX_SECONDS_BETWEEN_LOOKS
            if asleep > 0:
                self.marked += asleep
                self.since += asleep
                self.begun_at += asleep
                self.heard_at = {rank: at + asleep for rank, at in list(self.heard_at.items())}
            looked_at = time.monotonic()
            # What a rank has said explains what is seen of it.
            seen = self._seen_while_joining if self.is_joining else self._seen
            fault = self._told() or seen()
            if fault is None or self.ended.is_set():  # the main thread ends this rank
                continue
            first = self.put_first(fault)[1]
            # Unless it is stuck, the main thread sees a broken connection, and ends this rank by
            # itself. After a second signal no connection may break: the rank that heard it waits
            # for this one, whose main thread waits in a collective and hears no signal.
            is_stop = first.code == STOPPED
            seconds = SECONDS_TO_STOP if is_stop else SECONDS_TO_END
            if not self.is_joining and not self._is_still() and self.ended.wait(seconds):
                return
            self.claim_end()
            if not self.is_joining and not is_stop:
                stack = traceback.format_stack(sys._current_frames()[self.main_thread])
                print(
                    f"Rank {self.rank} was here:\n{''.join(stack[-8:])}",
                    file=sys.stderr,
                    flush=True,
                )
            self.on_fault(first)

    def _told(self) -> Optional[Fault]:
        """Why this rank must end, as a signal, the store, or the exit of a rank that this one
        started says. None: no reason."""
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
        # Its last beat may be older than the last step of all ranks.
        step = max(self.step, beat["step"])
        return Fault(f"rank {rank} {how} after step {step}, {beat['doing']}.", PEER_LOST)

    def _seen_while_joining(self) -> Optional[Fault]:
        """Which rank is missing, or lost before all have joined. None: all is well."""
        limit = f"{self.timeout_seconds:.0f} s (--join_timeout)"
        # The others wait for rank 0, and rank 0 for all of them.
        awaited = sorted(self._listened()) if self.rank == 0 else [0]
        silence = {rank: self._silence(rank) for rank in awaited}
        gone = [rank for rank in awaited if silence[rank] > self.timeout_seconds]
        for rank in gone:
            if rank in self.beats:
                return self._silent(rank, limit)
        if gone:
            self.lost.update(gone)
            host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT")
            answer = "nothing was heard of it" if self.done else "nobody answers"
            return Fault(
                f"rank {gone[0]} hasn't joined: {answer} at {host}:{port} for {limit}.", PEER_LOST
            )
        # The time to connect begins once all are there.
        are_all_there = not self._unheard() and max(silence.values(), default=0.0) <= self.patience
        if self.rank != 0 or not are_all_there:
            self.marked = time.monotonic()
        if not self._is_still():
            return None
        return Fault(
            f"all ranks are there, but haven't connected to each other within {limit}: can their "
            "machines reach each other on the interface that GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME names?",
            PEER_LOST,
        )

    def _seen(self) -> Optional[Fault]:
        """Which rank is lost or frozen, or hangs, as the heartbeats show. None: all is well."""
        # Rank 0 has gone with the store, or is frozen.
        unanswered = time.monotonic() - self.begun_at if self.done < self.begun else 0.0
        if unanswered > self.timeout_seconds + SECONDS_TO_TELL + 2 * self.interval:
            self.store_is_lost = True
        if self.store_is_lost:
            return self._silent(0)

        # Each collective is progress, such as those for the layers of a model that is loaded.
        if self.collectives != waiting.collectives:
            self.collectives, self.marked = waiting.collectives, time.monotonic()
            self.hears_all = self.rank == 0
        # No progress here. The others wait for a rank that is silent or, if none is, for the one
        # that is behind.
        if self._is_still():
            self.hears_all = True
        # By then every rank that lives has been heard.
        if not self._is_still(self.patience + self.interval):
            return None
        for rank in sorted(self._listened()):
            if self._silence(rank) > self.patience:
                return self._silent(rank)
        beats = {**self.beats, self.rank: self._beat()}
        # This rank may wait for one that works, such as rank 0 that writes a large checkpoint.
        if min(beat["still"] for beat in beats.values()) < self.timeout_seconds:
            return None
        return hanging(beats, self.timeout_seconds)

    def _is_still(self, more_seconds: float = 0.0) -> bool:
        return time.monotonic() - self.marked >= self.timeout_seconds + more_seconds

    def _silence(self, rank: int) -> float:
        return time.monotonic() - self.heard_at.get(rank, self.since)

    def _has_ended(self, rank: int) -> bool:
        return rank in self.beats and self.beats[rank]["ended"]

    def _silent(self, rank: int, limit: str = "") -> Fault:
        """The fault of a silent rank, which is given up. limit: how long it was silent, in words
        (default: measured)."""
        self.lost.add(rank)
        if rank not in self.beats:
            return Fault(f"rank {rank} is lost or frozen: nothing was ever heard of it.", PEER_LOST)
        beat, silent = self.beats[rank], limit or f"{self._silence(rank):.1f} s"
        when = "before training began"
        if not self.is_joining:
            when = f"after step {beat['step']}, {beat['doing']}"
        who = f"rank {rank} (process {beat['pid']} on {beat['host']})"
        return Fault(f"{who} is lost or frozen: silent for {silent}, {when}.", PEER_LOST)


def hanging(beats: dict[int, dict[str, Any]], seconds: float) -> Fault:
    """The fault of ranks that all live and make no progress: the one that has entered the fewest
    collectives hangs.

    beats: rank -> its heartbeat.
    """
    behind, *ahead = sorted(beats, key=lambda rank: (beats[rank]["collectives"], rank))
    beat = beats[behind]
    since = f"after step {beat['step']}, {beat['doing']}"
    if ahead and beats[ahead[0]]["collectives"] > beat["collectives"]:
        since += "; the others wait for it"
    return Fault(
        f"rank {behind} hangs: no progress for {seconds:.0f} s {since} (--hang_timeout).", PEER_LOST
    )
