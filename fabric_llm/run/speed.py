"""How fast a run trains: tokens and FLOPs per second, how long a step waits, and peak memory."""

import resource
import time

import numpy as np
import torch

from fabric_llm.data.batches import Prefetch, added
from fabric_llm.model.flops import Flops, peak_tflops


class Stopwatch:
    """The seconds spent inside its `with` blocks, of which one may be in another."""

    def __init__(self) -> None:
        self.seconds, self._began, self._depth = 0.0, 0.0, 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._began = time.monotonic()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.monotonic() - self._began


class Speed:
    """Tokens and FLOPs per second, and how long a step waits. Each lap is an average since the one
    before.

    The log counts `tokens` and `steps`. Time in `other`, of evaluations, saves and rewinds, counts
    only for what is left.
    """

    def __init__(
        self, flops: Flops, device: torch.device, world_size: int, batches: Prefetch
    ) -> None:
        """flops: of the model. batches: of this rank, whose wait for data stands for all ranks'."""
        self.flops, self.world_size, self.batches = flops, world_size, batches
        # Without a known peak, as of a CPU, there is no MFU.
        self.peak = None
        if device.type == "cuda":
            self.peak = peak_tflops(torch.cuda.get_device_name(device))
        self.tokens = self.steps = 0  # of this process, also those that a rewind has undone
        self.waits, self.other, self.began = Stopwatch(), Stopwatch(), time.monotonic()
        # Seconds, tokens, steps, seconds that steps waited for data, and for the device.
        self.at_last_lap = np.zeros(5)
        # How many tokens had stood at each place of a row by the last lap.
        self.tokens_at = np.zeros(1, dtype=np.int64)

    def begin(self) -> None:
        """A step begins. What came before the first one, such as an evaluation and the opening of
        trackers, is no training, and doesn't come again."""
        if self.steps == 0:
            self.began, self.other.seconds = time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without `other`."""
        return time.monotonic() - self.began - self.other.seconds

    def lap(self) -> dict[str, float]:
        """Metrics of the steps since the last lap, with `mfu` if the device's peak is known."""
        read, waited = self.batches.seconds_waited, self.waits.seconds
        # Totals so far: a lap is what came to them since the last one.
        now = np.array([self.seconds, self.tokens, self.steps, read, waited])
        seconds, tokens, steps, read, waited = (now - self.at_last_lap).tolist()
        self.at_last_lap = now
        # The FLOPs of a token depend on its place: later ones attend to more tokens.
        tokens_at = added(self.batches.tokens_at, -self.tokens_at)
        self.tokens_at = self.batches.tokens_at
        flops_per_token = self.flops.of(tokens_at) / max(int(tokens_at.sum()), 1)

        # Without a step since the last lap all rates are 0.
        total = tokens / max(seconds, 1e-9)
        per_device = total / self.world_size
        tflops = per_device * flops_per_token / 1e12
        record = {
            "tokens_per_second": total,
            "tokens_per_second_per_device": per_device,
            "model_tflops_per_device": tflops,
        }
        if self.peak is not None:
            record["mfu"] = tflops / self.peak
        # Both are seconds a step.
        record["data_seconds"] = read / max(steps, 1)
        record["wait_seconds"] = waited / max(steps, 1)
        return record

    def seconds_left(self, steps_left: int) -> float:
        """Seconds that `steps_left` steps will take at the average speed so far, with evaluations
        and saves as often as so far."""
        return (self.seconds + self.other.seconds) / max(self.steps, 1) * steps_left


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far, GiB: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
