"""--profile: what some steps spend their time and memory on, in files for the viewers of PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
from torch.profiler import ProfilerActivity, profile

from fabric_llm.plan.run_directory import no_link

LARGEST = 5  # costs that are printed
MOST_EVENTS = 200_000  # of the memory snapshot: allocations


class Profile:
    """Records one stretch of steps, once, on this rank; nothing where no steps are given."""

    def __init__(
        self, steps: Optional[tuple[int, int]], folder: Path, device: torch.device, say: Callable[[str], None]
    ) -> None:
        """steps: the first and the last. say: prints a line."""
        self.steps, self.folder, self.device, self.say = steps, folder, device, say
        self.recorder: Any = None
        self.first = self.last = 0  # steps that were recorded
        self.began = 0.0

    def begin(self, step: int) -> None:
        """Start if `step`, which comes now, is to be recorded."""
        if self.steps is None or self.recorder is not None or not self.steps[0] <= step <= self.steps[1]:
            return
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        # acc_events: without it torch 2.11 warns of events of other cycles, of which there are none.
        self.recorder = profile(activities=activities, acc_events=True)
        self.first, self.began = step, time.monotonic()
        self.recorder.start()

    def ends(self, step: int) -> bool:
        """True if `step`, which is done, is the last to record."""
        self.last = step
        return self.recorder is not None and step >= self.steps[1]

    def write(self) -> None:
        """Write what was recorded, if anything is, and print the largest costs. A failure is a warning: the run goes on."""
        if self.recorder is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        recorder, self.recorder, self.steps = self.recorder, None, None
        seconds = time.monotonic() - self.began
        recorder.stop()
        name = f"steps-{self.first}-{self.last}"
        try:
            no_link(self.folder).mkdir(exist_ok=True)
            trace = no_link(self.folder / f"{name}.json")
            recorder.export_chrome_trace(str(trace))
            if self.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(no_link(self.folder / f"{name}.memory.pickle")))
        except (OSError, RuntimeError, ValueError) as error:
            self.say(f"Warning: the profile of steps {self.first} to {self.last} couldn't be written: {error}")
            return
        finally:
            if self.device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)
        self.say(f"Profile of steps {self.first} to {self.last}, {seconds:.2f} s: {trace}. Its largest costs:")
        for line in largest_costs(recorder.key_averages(), on_device=self.device.type == "cuda"):
            self.say(line)


def largest_costs(averages: Any, on_device: bool) -> list[str]:
    """The operations that take most time themselves, without what they call: of the GPU if on_device, else of the CPU."""
    name = "self_device_time_total" if on_device else "self_cpu_time_total"  # microseconds
    costs = sorted(((getattr(event, name), event.count, event.key) for event in averages), reverse=True)
    total = sum(cost[0] for cost in costs) or 1.0
    return [
        f"  {cost / total:6.1%} {cost / 1e6:9.3f} s {count:8d} x  {key}" for cost, count, key in costs[:LARGEST] if cost
    ]
