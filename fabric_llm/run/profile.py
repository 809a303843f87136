"""--profile: a trace of some steps of rank 0, and the largest costs in it."""

import time
from pathlib import Path
from typing import Optional

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from fabric_llm.base.files import no_link

LARGEST_COSTS = 5  # that are printed
MAX_CHARACTERS = 100  # of their names: templates of C++ have hundreds


class Profile:
    """Records the steps from `first` to `last` once, into a file of `folder`."""

    def __init__(self, first: int, last: int, folder: Path, device: torch.device) -> None:
        self.first, self.last, self.folder, self.device = first, last, folder, device
        self.recorder: Optional[profile] = None
        self.began = 0.0

    def begin(self, step: int) -> None:
        """Start recording if `step` is the first of these steps that this process makes."""
        if self.recorder is not None or not self.first <= step <= self.last:
            return
        self.first, self.began = step, time.monotonic()
        # Without acc_events, torch 2.11 warns of events of other cycles, of which there are none.
        self.recorder = profile(acc_events=True)
        self.recorder.start()

    def end(self, step: int) -> list[str]:
        """Stop recording after `step` and write the trace, if steps were recorded. Returns lines
        to print; a trace that can't be written is a warning."""
        if self.recorder is None:
            return []
        # Timed before `stop`, which collects what was recorded.
        recorder, seconds = self.recorder, time.monotonic() - self.began
        recorder.stop()
        self.recorder, self.last = None, 0  # a rewind doesn't record the steps again
        steps = f"steps {self.first} to {step}"
        trace = self.folder / f"steps-{self.first}-{step}.json"
        try:
            no_link(self.folder).mkdir(exist_ok=True)
            recorder.export_chrome_trace(str(no_link(trace)))
        # Such as a full disk, which mustn't end the run.
        except (OSError, RuntimeError, ValueError) as error:
            return [f"Warning: the profile of {steps} couldn't be written: {error}"]
        title = f"Profile of {steps}, {seconds:.2f} s: {trace}. Its largest costs:"
        return [title, *self._costs(recorder)]

    def _costs(self, recorder: profile) -> list[str]:
        # The time of an operation without those that it calls, in microseconds.
        time_of, on_gpu = "self_cpu_time_total", self.device.type == "cuda"
        if on_gpu:
            time_of = "self_device_time_total"
        costs = []
        for event in recorder.key_averages():
            # torch gives a kernel's time to the kernel, to the operation that starts it, and to
            # named ranges around it. The kernels alone add up to the time of the device.
            is_kernel = event.device_type != DeviceType.CPU and not event.is_user_annotation
            if is_kernel or not on_gpu:
                costs.append((getattr(event, time_of), event.count, event.key))
        costs.sort(reverse=True)
        # If nothing was recorded, there is nothing to divide.
        total = sum(cost for cost, *_ in costs) or 1.0
        return [
            f"  {cost / total:6.1%} {cost / 1e6:9.3f} s {count:8d} x  {name[:MAX_CHARACTERS]}"
            for cost, count, name in costs[:LARGEST_COSTS]
        ]
