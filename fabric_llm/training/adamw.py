"""AdamW that keeps small updates in bfloat16 parameters.

A bfloat16 number has 8 significant bits, so an update smaller than 1/512 of its weight is rounded away, and at the
learning rates of continued pretraining most are. `updates` says what is done about it:

| updates    | a new bfloat16 parameter is                     | state, bytes a parameter             |
|------------|-------------------------------------------------|--------------------------------------|
| stochastic | rounded up or down at random, right on average  | moments bfloat16: 4                  |
| master     | a float32 master, rounded to nearest            | master and moments float32: 12       |
| nearest    | rounded to nearest: torch.optim.AdamW           | moments bfloat16: 4                  |

The arithmetic is float32 everywhere. Rounding to nearest is left to torch's fused kernel; what is rounded stochastically
goes through adamw_rounded.py. Besides its state, a step takes at most 8 MiB on a CPU and 512 MiB on a GPU, however large
the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from fabric_llm.base.failpoints import failpoint
from fabric_llm.model.strategy import local_part
from fabric_llm.training.adamw_rounded import UPDATED, Origin, kernel_for, rounded_step

UPDATES = ("stochastic", "nearest", "master")
BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}  # a CPU's block stays in its cache, a GPU's hides the launches


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), in the arithmetic of torch.optim.AdamW.

    Parameters that aren't bfloat16 are treated as torch.optim.AdamW(fused=True) would, whatever `updates` is.
    State of a parameter: `step` (float32 scalar, always on the CPU), `exp_avg`, `exp_avg_sq`, and under master `master`:
    shape, device and placement (DTensor) of the parameter, dtypes as above. The moments are rounded like the parameter.
    If they were rounded to nearest, exp_avg_sq could never fall where beta2 is above 0.998.

    Rounding is a function of (seed, step of the parameter, its name, tensor, index in the whole parameter): the same on CPUs
    and GPUs, however a parameter is split over ranks. Nothing is saved for it, torch's generators stay as they are, and
    the host never waits for a GPU. `origins` says what each parameter is a piece of; one that it doesn't name is taken
    for whole, and for its name its place among the parameters.

    Parameters and state are contiguous; gradients may have any layout and dtype.
    Raises ValueError if `updates` is none of UPDATES.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        updates: str = "stochastic",
        seed: int = 0,
        origins: Optional[Mapping[Tensor, Origin]] = None,
    ) -> None:
        if updates not in UPDATES:
            raise ValueError(f"updates {updates!r} is none of {', '.join(UPDATES)}.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.updates, self.seed, self.origins = updates, seed, dict(origins or {})
        self.elements = sum(local_part(param).numel() for group in self.param_groups for param in group["params"])

    @torch.no_grad()
    def initialise(self) -> None:
        """State of every parameter, as it is before a first step: saving needs no step to make it."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self._initialise(param, self.state[param])

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """One step for every parameter that has a gradient. With lr 0 parameters keep every bit."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            failpoint("optimizer_step")
            for (device, dtype, step), (tensors, origins) in self._alike(group, number).items():
                if dtype != torch.bfloat16 or self.updates == "nearest":
                    plain_step(tensors, group, step)
                elif self.updates == "master":
                    master_step(tensors, group, step)
                else:
                    rounded_step(tensors, origins, group, int(step), self.seed, kernel_for(device, self.elements))
        return loss

    def _alike(self, group: dict[str, Any], number: int) -> dict[Any, tuple[list[dict[str, Tensor]], list[Origin]]]:
        """(device, dtype, step) -> for each parameter its flat local tensors (param, grad, state), and its origin.

        Counts the step. `number` is the group's.
        """
        trained = [(index, param) for index, param in enumerate(group["params"]) if param.grad is not None]
        for _, param in trained:
            if not self.state[param]:
                self._initialise(param, self.state[param])
        if trained:
            torch._foreach_add_([self.state[param]["step"] for _, param in trained], 1)
        alike: dict[Any, tuple[list[dict[str, Tensor]], list[Origin]]] = {}
        for index, param in trained:
            tensors = {"param": param, "grad": param.grad.contiguous(), **self.state[param]}
            step = tensors.pop("step").item()
            flat = {name: local_part(tensor).view(-1) for name, tensor in tensors.items()}
            if flat["param"].numel():  # a rank may hold nothing of a sharded parameter
                key = flat["param"].device, param.dtype, step
                tensors_alike, origins = alike.setdefault(key, ([], []))
                tensors_alike.append(flat)
                origins.append(self.origins.get(param) or Origin(f"{number}.{index}"))
        return alike

    def _initialise(self, param: Tensor, state: dict[str, Tensor]) -> None:
        rounded = param.dtype == torch.bfloat16
        moments = torch.float32 if rounded and self.updates == "master" else param.dtype
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=moments, memory_format=torch.contiguous_format)
        if rounded and self.updates == "master":
            state["master"] = param.detach().to(torch.float32, memory_format=torch.contiguous_format)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, which rounds all state to the parameter's dtype, and then master's float32 state as it was saved."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for number, param in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name == "step":
                    self.state[param][name] = torch.as_tensor(value, dtype=torch.float32, device="cpu").clone()
                elif self.updates == "master" and param.dtype == torch.bfloat16:
                    self.state[param][name] = value.to(device=param.device, dtype=torch.float32)


def checkpoint_bytes(parameters: Iterable[Tensor], updates: str, ema: Optional[str] = None) -> int:
    """Bytes of parameters and the state of those that train, after a step, on any device.

    ema: device of a moving average, host or same.
    """
    total = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            total += parameter.numel() * parameter.element_size()
            continue
        wide = updates == "master" and parameter.dtype == torch.bfloat16
        total += parameter.numel() * (2 + 3 * 4 if wide else 3 * parameter.element_size())
        if ema is not None:
            total += parameter.numel() * (4 if ema == "host" else parameter.element_size())
    return total


def plain_step(tensors: list[dict[str, Tensor]], group: dict[str, Any], step: float) -> None:
    """torch.optim.AdamW(fused=True) for parameters and moments of one dtype."""
    params, grads, exp_avgs, exp_avg_sqs = ([t[name] for t in tensors] for name in UPDATED)
    _fused(params, [grad.to(param.dtype) for grad, param in zip(grads, params)], exp_avgs, exp_avg_sqs, group, step)


def master_step(tensors: list[dict[str, Tensor]], group: dict[str, Any], step: float) -> None:
    """float32 master and moments; the parameter becomes the master, rounded to nearest."""
    block = BLOCK_ELEMENTS["cpu" if tensors[0]["param"].device.type == "cpu" else "cuda"]
    for t in tensors:
        for param, grad, exp_avg, exp_avg_sq, master in zip(*(t[name].split(block) for name in (*UPDATED, "master"))):
            _fused([master], [grad.float()], [exp_avg], [exp_avg_sq], group, step)
            if group["lr"] != 0:
                param.copy_(master)


def _fused(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    group: dict[str, Any],
    step: float,
) -> None:
    beta1, beta2 = group["betas"]
    options = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}
    options |= {"eps": group["eps"], "amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
    steps = [torch.full((), step, dtype=torch.float32, device=params[0].device)] * len(params)
    torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], steps, **options)
