"""AdamW that keeps small updates of bfloat16 parameters. `make_optimizer` makes the optimizer of a
run.

A bfloat16 number has 8 significant bits, so an update smaller than 1/512 of its weight is rounded
away. At the learning rates of continued pretraining most updates are. `updates` says what is done:

| updates    | a new bfloat16 parameter is                    | state, bytes a parameter         |
|------------|------------------------------------------------|----------------------------------|
| stochastic | rounded up or down at random, right on average | moments bfloat16: 4              |
| master     | a float32 master, rounded to nearest           | master and moments float32: 12   |
| nearest    | rounded to nearest: torch.optim.AdamW          | moments bfloat16: 4              |

All arithmetic is float32. Besides its state, a step takes at most 8 MiB on a CPU and 512 MiB on a
GPU for any model.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, Optional

import torch
from torch import Tensor, nn

from fabric_llm.base import register
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import Fault, one_line
from fabric_llm.base.flag import Flags
from fabric_llm.model import sharded
from fabric_llm.model.sharded import local_part
from fabric_llm.model.weights import PREFIX
from fabric_llm.training import adamw_rounded
from fabric_llm.training.adamw_rounded import (
    ALIGNED_ELEMENTS,
    Origin,
    Update,
    compiled,
    equals_plain,
    plain_update,
)

# Below this, plain PyTorch takes less time in ten steps than compiling a kernel would.
MIN_ELEMENTS = 2**20
UPDATED = ("exp_avg", "exp_avg_sq", "master")  # of the state
UPDATES = ("stochastic", "nearest", "master")
# Blocks of the update of masters. On a CPU they fit its cache, on a GPU they hide launches.
BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}


def make_optimizer(
    wrapped: nn.Module, decayed: set[str], training: Flags, updates: str
) -> torch.optim.Optimizer:
    """The optimizer for a wrapped model: AdamW, or that of --code. Its state must be tensors, so
    that checkpoints can hold it.

    decayed: names of parameters, see `decayed_names`. training: the flags of that group. updates:
    see above.
    """
    shards = sharded.shards(wrapped)
    named = [(name, shard.parameter) for name, shard in shards.items()]
    groups = parameter_groups(named, decayed, training.weight_decay)
    # By name and place in the whole parameter, so that rounding doesn't depend on the sharding.
    origins = {shard.parameter: (name, shard.first) for name, shard in shards.items()}
    # An optimizer of --code gets the same groups, so its weight decay is on matrices as well.
    if "optimizer" in register.ONLY:
        names = {parameter: name.removeprefix(PREFIX) for name, parameter in named}
        store = rounding(origins, training.seed)
        with register.of_user("optimizer"):
            made = register.ONLY["optimizer"](groups, names, store, register.LOADED["flags"])
        if not isinstance(made, torch.optim.Optimizer):
            kind = type(made).__name__
            raise Fault(f"--code: the optimizer must return a torch.optim.Optimizer: {kind}.")
        made.settings_at_start = _settings(made)
        made.origins = origins  # for the rounding of --ema_decay's average
        return made
    betas = (training.beta1, training.beta2)
    return AdamW(
        groups, lr=training.lr, betas=betas, updates=updates, seed=training.seed, origins=origins
    )


def rounding(
    origins: Mapping[Tensor, Origin], seed: int
) -> Callable[[nn.Parameter, Tensor, float], None]:
    """For an optimizer of --code: `store(parameter, values, step)` writes float32 values into a
    parameter that `origins` names.

    A bfloat16 parameter is rounded stochastically, as AdamW's are: small updates aren't lost, and
    the bits are the same on any devices, however parameters are sharded. values: of the parameter's
    shape and placement. step: a number that is another in each step, such as a count of them in the
    optimizer's state. Parameters of other dtypes are copied into.
    """

    @torch.no_grad()
    def store(parameter: nn.Parameter, values: Tensor, step: float) -> None:
        # Of a sharded parameter, this rank has and writes its own part.
        target, here = local_part(parameter), local_part(values)
        if target.dtype != torch.bfloat16:
            target.copy_(here)
        else:
            adamw_rounded.round_stochastically(target, here, origins[parameter], seed, int(step))

    return store


def kept_updates(training: Flags, updates: str) -> Optional[float]:
    """The fraction of small updates that reaches bfloat16 weights with the optimizer of
    `make_optimizer`; None if it can't be measured.

    Of a small matrix, against the same one in float32. All ranks call it: an optimizer may need
    all.
    """
    # The same updates of 2**-13 for bfloat16 and float32 weights: how far do they get?
    signs = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).sign()
    moved = []
    try:
        # float32 shows how far the updates go when none is lost.
        for dtype in (torch.bfloat16, torch.float32):
            probe = nn.Module()
            probe.module = nn.Linear(32, 32, bias=False, dtype=dtype)
            weight = probe.module.weight
            nn.init.constant_(weight, 1.5)  # its neighbours are 2**-7 away
            optimizer = make_optimizer(probe, set(), training, updates)
            for group in optimizer.param_groups:
                # With momentum an update is 10 times as large, which is still rounded away.
                group["lr"] = 2.0**-13
            # 64 updates of 2**-13 add up to 2**-7, which is one step between bfloat16 numbers here.
            for _ in range(64):
                weight.grad = signs.to(dtype)
                optimizer.step()
            moved.append(((1.5 - weight.detach().float()) * signs).mean().item())
        return moved[0] / moved[1]
    except Exception:  # code of a user's own, which may be made for its model alone
        return None


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """{name of a setting and number of its group: its value in words} but for what the run sets."""
    return {
        f"{name} of group {number}": repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "lr")
    }


def require_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Raises Fault where checkpoints couldn't hold the state of an optimizer of --code."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric's wrapper
    if changed := _settings(optimizer).items() - optimizer.settings_at_start.items():
        raise Fault(
            f"the optimizer changes {min(changed)[0]!r} in its param_groups, which checkpoints "
            "don't hold: keep it as a tensor in its state (docs/make_it_yours.md)."
        )
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, state in optimizer.state.items():
        if key not in known or not isinstance(state, dict):
            raise Fault(
                "the optimizer keeps state that is of no parameter, which checkpoints don't hold: "
                "keep it in the state of each (docs/make_it_yours.md)."
            )
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise Fault(
                    f"the optimizer keeps {name!r} as {type(value).__name__}, but checkpoints hold "
                    "tensors alone: make it one (docs/make_it_yours.md)."
                )


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters with weight decay: matrices, but not norms and biases.

    model: unwrapped, because FSDP shows each parameter as a one-dimensional piece.
    """
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], decayed: set[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for an optimizer, with and without weight decay. Names are those of the unwrapped
    model."""
    # A frozen parameter has no state, and takes no memory in the optimizer.
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    with_decay = [parameter for name, parameter in trained if name in decayed]
    without = [parameter for name, parameter in trained if name not in decayed]
    settings = ((with_decay, weight_decay), (without, 0.0))
    return [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in settings
        if parameters
    ]


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), in the arithmetic of
    torch.optim.AdamW.

    Parameters that aren't bfloat16 are treated as torch.optim.AdamW(fused=True) would, whatever
    `updates` is, which is one of UPDATES. State of a parameter, from the beginning: `step` (float32
    scalar, always on the CPU), `exp_avg`, `exp_avg_sq`, and under master `master`: shape, device
    and placement (DTensor) of the parameter, dtypes as above. The moments are rounded like the
    parameter: to nearest, exp_avg_sq could never fall where beta2 is above 0.998.

    Rounding is a function of (seed, step of the parameter, its name, tensor, index in the whole
    parameter): the same on CPUs and GPUs, however a parameter is split over ranks. Nothing is saved
    for it. `origins` says what each parameter is a piece of; one that it doesn't name is taken for
    whole, and for its name its place among the parameters.
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
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.updates, self.seed, self.elements, self.origins = updates, seed, 0, {}
        # One list for good, which Fabric's wrapper has as well: its zero_grad() empties it here.
        self.prepared: list[list[Callable[[dict[str, Any]], None]]] = []
        # A parameter without an origin, as in a test, has its place among the parameters as name.
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                self.origins[param] = (origins or {}).get(param, (f"{number}.{index}", 0))
                self.elements += local_part(param).numel()
                self._begin(param)

    def _begin(self, param: Tensor) -> None:
        # Moments in the parameter's dtype, except those of a master, which is float32.
        wide = self.updates == "master" and param.dtype == torch.bfloat16
        kept = {
            "dtype": torch.float32 if wide else param.dtype,
            "memory_format": torch.contiguous_format,
        }
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = (
            torch.zeros_like(param.detach(), **kept) for _ in range(2)
        )
        if wide:
            state["master"] = param.detach().to(**kept)

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepare the next `step` as far as it depends neither on the values of gradients nor on
        the learning rate. Called while a GPU still computes gradients, so that this takes no time
        of its own. Until `step` gradients may change in place, as clipping changes them."""
        self.prepared[:] = [self._launches(group) for group in self.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        """One step for every parameter that has a gradient. With lr 0 parameters keep every bit."""
        if not self.prepared:
            self.prepare()
        for group, launches in zip(self.param_groups, self.prepared):
            failpoint("optimizer_step")
            for launch in launches:
                launch(group)
            trained = [param for param in group["params"] if param.grad is not None]
            if trained:
                torch._foreach_add_([self.state[param]["step"] for param in trained], 1)
        self.prepared.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. A step that is prepared holds gradients, so it is given up as well."""
        self.prepared.clear()
        super().zero_grad(set_to_none)

    def _launches(self, group: dict[str, Any]) -> list[Callable[[dict[str, Any]], None]]:
        """The calls with which a step updates the parameters of a group."""
        # What one kernel takes: a parameter, its gradient and its state, and what they are a piece
        # of.
        alike: dict[Any, list[tuple[list[Tensor], Origin]]] = {}
        params = [param for param in group["params"] if param.grad is not None]
        # The counters are on the CPU, so that reading them doesn't wait for a GPU.
        counts = [self.state[param]["step"] for param in params]
        steps = (torch.stack(counts) + 1).tolist() if counts else []
        for param, step in zip(params, steps):
            # Kernels get addresses, and take what lies there as contiguous.
            if not param.grad.is_contiguous():
                param.grad = param.grad.contiguous()
            state = self.state[param]
            held = [param, param.grad, *(state[name] for name in UPDATED if name in state)]
            tensors = [local_part(tensor) for tensor in held]
            if tensors[0].numel():  # else this rank holds nothing of a sharded parameter
                # A kernel takes one device, one dtype and, for the bias correction, one step.
                key = param.device, param.dtype, param.grad.dtype, step
                alike.setdefault(key, []).append((tensors, self.origins[param]))
        launches: list[Callable[[dict[str, Any]], None]] = []
        for (device, dtype, _, step), some in alike.items():
            if dtype == torch.bfloat16 and self.updates == "stochastic":
                # A small model isn't worth the time that compiling a kernel takes.
                update = fastest(device) if self.elements >= MIN_ELEMENTS else plain_update
                pieces = adamw_rounded.pieces_of_all(some, self.seed, int(step))
                launches.append(
                    partial(adamw_rounded.rounded_step, pieces, step=int(step), update=update)
                )
            elif dtype == torch.bfloat16 and self.updates == "master":
                launches += [partial(master_step, tensors, step=step) for tensors, _ in some]
            else:
                launches.append(partial(fused_step, [tensors for tensors, _ in some], step=step))
        return launches

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as it was saved. torch's own would round it to the parameter's dtype."""
        # It also checks that the groups have as many parameters.
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        # torch numbers parameters in the order of their groups.
        for number, param in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                counts = name == "step"  # copied, since each parameter's is incremented in place
                self.state[param][name] = value.to("cpu" if counts else param.device, copy=counts)


@cache
def fastest(device: torch.device) -> Update:
    """The kernel of a device, if it compiles and has the right bits. Otherwise warn, and return
    `plain_update`, with the same bits."""
    # Other devices, such as TPUs, have no kernel here.
    if device.type not in ("cpu", "cuda"):
        return plain_update
    try:
        if device.type == "cpu":
            update = compiled()
        else:
            # Where there are GPUs there is Triton.
            from fabric_llm.training.adamw_triton import update
        # Of odd lengths and of aligned ones, for which kernels may take different paths.
        if equals_plain(update, device) and equals_plain(update, device, ALIGNED_ELEMENTS):
            return update
        reason = "its bits differ from those of plain PyTorch"
    except Exception as error:  # whatever a compiler does, plain PyTorch has the same bits
        reason = one_line(getattr(error, "stderr", None) or f"{type(error).__name__}: {error}")[
            :400
        ]
    # Each rank compiles its own, but one warning is enough.
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        needs = "a C++ compiler" if device.type == "cpu" else "Triton and a C compiler"
        warnings.warn(
            f"The optimizer's kernel for {device.type}, which needs {needs}, isn't used "
            f"({reason}). "
            "Without it, plain PyTorch takes several times as long for the same numbers.",
            stacklevel=2,
        )
    return plain_update


def fused_step(tensors: list[list[Tensor]], group: dict[str, Any], step: float) -> None:
    """torch.optim.AdamW(fused=True) for parameters and moments of one dtype."""
    params, grads, exp_avgs, exp_avg_sqs = map(list, zip(*tensors))
    # The kernel takes one dtype. The gradients of float32 masters are bfloat16.
    grads = [grad.to(param.dtype) for grad, param in zip(grads, params)]
    # The kernel takes the count on the device, while the state has it on the CPU.
    steps = [torch.full((), step, dtype=torch.float32, device=params[0].device)] * len(params)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        *(params, grads, exp_avgs, exp_avg_sqs, [], steps),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def master_step(tensors: list[Tensor], group: dict[str, Any], step: float) -> None:
    """float32 master and moments; the parameter becomes the master, rounded to nearest."""
    block = BLOCK_ELEMENTS["cpu" if tensors[0].device.type == "cpu" else "cuda"]
    # In blocks, so that a float32 copy of the gradient is small.
    for param, grad, exp_avg, exp_avg_sq, master in zip(
        *(tensor.view(-1).split(block) for tensor in tensors)
    ):
        fused_step([[master, grad, exp_avg, exp_avg_sq]], group, step)
        # With lr 0 a parameter must keep every bit.
        if group["lr"] != 0:
            param.copy_(master)


def checkpoint_bytes(parameters: Iterable[Tensor], updates: str, ema: Optional[str] = None) -> int:
    """Bytes of all parameters and of the state of those that train. ema: device of the moving
    average, host or same."""
    total = 0
    for parameter in parameters:
        each = own = parameter.element_size()
        if parameter.requires_grad:
            # Parameter and two moments; with masters bfloat16 and three float32 tensors.
            each = (
                2 + 3 * 4 if updates == "master" and parameter.dtype == torch.bfloat16 else 3 * own
            )
            each += {None: 0, "host": 4, "same": own}[ema]
        total += parameter.numel() * each
    return total
