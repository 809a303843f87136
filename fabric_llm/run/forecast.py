"""What plan.py says of a run, printed before its first step, and what came of it. On rank 0.

With --activation_checkpointing auto, it also says what to recompute.

plan.py runs beside the run while its model is loaded: a prediction needs a process that is no rank of a run.
"""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Optional

import torch

from fabric_llm.base.command_line import Flags, write_yaml
from fabric_llm.base.faults import one_line
from fabric_llm.forecast import accelerators
from fabric_llm.plan.plan import Plan

GIB = 2**30
SCRIPT = Path(__file__).parents[2] / "plan.py"
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
SECONDS_TO_PLAN = 120  # at most; it takes about ten, most of which are imports
WARM, MEASURED = 2, 3  # steps of a process: the first ones compile and allocate, and are left out of its seconds
FAR_OFF = 0.1  # of what was planned


class Planner:
    """plan.py, running with what a run was given and has found out."""

    def __init__(self, plan: Plan, flags: Flags, device: torch.device) -> None:
        self.device_gib, known = None, None
        if device.type == "cuda":
            self.device_gib = torch.cuda.get_device_properties(device).total_memory / GIB
            known = accelerators.of_device(torch.cuda.get_device_name(device), self.device_gib)
        self.is_timed = known is not None or self.device_gib is None
        place = plan.placement
        found = {"model_name": plan.model.source, "devices": place.devices, "num_nodes": place.num_nodes}
        found |= {"context_length": max(plan.contexts), "max_step": plan.schedule.max_step, "resume": False}
        with NamedTemporaryFile(suffix=".yaml", delete=False) as file:
            self.file = Path(file.name)
        write_yaml({**flags.kept(), **plan.resolved(), **found}, self.file)
        # Without the device's memory it says what a run needs, and not what to change where that is too much.
        chooses = plan.model.activation_checkpointing == "auto"
        words = ["--config", str(self.file), "--json", "true"]
        words += ["--device_memory", str(self.device_gib) if chooses else "1e9"]
        words += ["--accelerator", place.kind] + (["--accelerator_name", known.name] if known else [])
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *words],
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @cached_property
    def forecast(self) -> Optional["Forecast"]:
        """The plan, which is waited for. None, with a warning, if there is none."""
        error = ""
        try:
            said, error = self.process.communicate(timeout=SECONDS_TO_PLAN)
            numbers = json.loads(said)
        except (subprocess.TimeoutExpired, ValueError):
            self.process.kill()
            *_, last = error.strip().splitlines() or [""]  # what comes before may be torch's log
            why = one_line(last).rstrip(".") or f"it took more than {SECONDS_TO_PLAN} seconds"
            warnings.warn(f"The run isn't compared with its plan: {why}.", stacklevel=2)
            return None
        finally:
            self.file.unlink(missing_ok=True)
        seconds = numbers["seconds"] if self.is_timed else None
        memory, recomputed = numbers["memory"], numbers["activation_checkpointing"]
        return Forecast(memory["parts"], memory["moment"], seconds, self.device_gib, recomputed)

    def activation_checkpointing(self) -> str:
        """What --activation_checkpointing auto takes: full where there is no plan."""
        return "full" if self.forecast is None else self.forecast.activation_checkpointing


@dataclass
class Forecast:
    """What was planned, and from when on the run is measured."""

    parts: dict[str, int]  # bytes of a device at the peak
    moment: str  # of the peak
    seconds: Optional[dict[str, float]]  # of a step, by plan/accelerators.Seconds; None where the device isn't known
    device_gib: Optional[float]  # of memory; None for a CPU, which doesn't count what tensors hold
    activation_checkpointing: str = "none"
    warm: tuple[int, float] = (0, 0.0)  # steps and seconds of training that aren't measured

    def __str__(self) -> str:
        """What is planned, in words."""
        of_device = f" of {self.device_gib:.3g}" if self.device_gib else ""
        words = [f"{sum(self.parts.values()) / GIB:.3g} GiB{of_device} a device at the peak, in {self.moment}"]
        words += [f"{self.seconds['step']:.3g} s a step"] if self.seconds else []
        return "; ".join(words)

    def after(self, steps: int, seconds: float, peak_gib: float) -> tuple[dict[str, Any], str]:
        """(for metrics.jsonl, in words), ({}, "") if nothing was measured.

        steps, seconds: of training, in this process. peak_gib: that tensors have held.
        """
        compared, found, said = {}, {}, []
        held = {name: size / GIB for name, size in self.parts.items() if not name.endswith("(assumed)")}
        if self.device_gib is not None:
            compared["peak_memory_gib"] = sum(held.values()), peak_gib, held, "GiB"
        if self.seconds and steps > self.warm[0]:
            step = (seconds - self.warm[1]) / (steps - self.warm[0])
            parts = {name: self.seconds[name] for name in ("compute", "messages")}
            compared["step_seconds"] = self.seconds["step"], step, parts, "s a step"
        for name, (planned, measured, parts, unit) in compared.items():
            ratio, largest = measured / planned, max(parts, key=parts.__getitem__)
            found[name] = {"planned": planned, "measured": measured, "ratio": ratio}
            far = f", most of it {largest}, {parts[largest]:.3g}" if abs(ratio - 1) > FAR_OFF else ""
            said.append(f"{measured:.3g} {unit}, {ratio:.2f} times the planned {planned:.3g}{far}")
        return found, "; ".join(said)
