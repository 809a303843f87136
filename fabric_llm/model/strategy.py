"""Arguments -> Fabric, and a model -> its wrapped form. Nothing else knows about sharding.

| name   | what it is                                          | a rank holds                    |
|--------|-----------------------------------------------------|---------------------------------|
| fsdp   | FullyShardedDataParallel, Fabric's FSDPStrategy     | a part (see sharding_strategy)  |
| fsdp2  | fully_shard, Fabric's ModelParallelStrategy         | a part                          |
| ddp    | DistributedDataParallel                             | everything                      |
| single | one device, no wrapper                              | everything                      |
| xla    | Fabric's XLAFSDPStrategy, for TPUs                  | a part                          |
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

from fabric_llm.base.fabric import (
    DDPStrategy,
    Fabric,
    FSDPPrecision,
    FSDPStrategy,
    LightningEnvironment,
    MixedPrecision,
    ModelParallelStrategy,
    Precision,
    TorchElasticEnvironment,
    XLAFSDPStrategy,
)
from fabric_llm.base.ranks import waits_for_others
from fabric_llm.model.strategy_rules import Sharding, wrap_size

MUCH_WASTED = 10**5  # parameters
LAYER_LISTS = (nn.ModuleList, nn.ModuleDict)  # no forward of their own: never wrapped


def make_fabric(
    name: str, *, devices: int, num_nodes: int, kind: str, precision: str, timeout_seconds: float = 1800.0
) -> Fabric:
    """Fabric for a strategy name of this module's table. Starts nothing: that is `fabric.launch()`.

    timeout_seconds: of the process group's own patience; a little more than that of watch.py, which can say more.
    """
    if name == "xla":
        return Fabric(accelerator="tpu", devices=devices, num_nodes=num_nodes, strategy=XLAFSDPStrategy())
    timeout = timedelta(seconds=2 * timeout_seconds + 60)
    strategy: Any = "auto"
    if name == "fsdp":
        strategy = AnyDeviceFSDPStrategy(timeout=timeout)
    elif name == "fsdp2":
        sizes = {"data_parallel_size": devices * num_nodes, "tensor_parallel_size": 1}
        strategy = ModelParallelStrategy(lambda model, mesh: model, **sizes, timeout=timeout)  # `wrap` shards it
    elif name == "ddp":
        strategy = DDPStrategy(gradient_as_bucket_view=True, timeout=timeout, **_no_buffer_sync())
    # Where ranks come from: torchrun, or launch.py, which knows srun. Fabric would take any SLURM job for srun's.
    environment = TorchElasticEnvironment() if TorchElasticEnvironment.detect() else LightningEnvironment()
    plugins = [_precision(name, precision, kind), environment]
    return Fabric(accelerator=kind, devices=devices, num_nodes=num_nodes, strategy=strategy, plugins=plugins)


class AnyDeviceFSDPStrategy(FSDPStrategy):
    """FSDPStrategy, also on CPU (Fabric refuses the class itself there). `wrap` makes the FSDP modules."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Leave it as `wrap` has made it. Fabric's own would look for metrics in it, and import torchmetrics for that."""
        return module


def _no_buffer_sync() -> dict[str, bool]:
    """Buffers are constants here; DDP would send them in each forward. torch 2.13 renamed the option."""
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _precision(name: str, precision: str, kind: str) -> Precision:
    if name == "fsdp":
        return _FSDPPrecision(precision, kind)
    if precision.endswith("-mixed"):
        return MixedPrecision(precision, device=kind)
    return Precision()  # the weights are in their dtype already, see loading.py


class _FSDPPrecision(FSDPPrecision):
    """Leaves the module as it is (`module.to(bfloat16)` would round RoPE's frequencies) and knows the CPU."""

    def __init__(self, precision: str, kind: str) -> None:
        super().__init__(precision)
        self.kind = kind

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def forward_context(self) -> AbstractContextManager:
        if not self.precision.endswith("-mixed"):
            return nullcontext()
        return torch.autocast(self.kind, dtype=torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16)


def modules_to_wrap(model: nn.Module, policy: str) -> list[nn.Module]:
    """The modules that are gathered as one, for an --auto_wrap_policy.

    Raises ValueError for a class name that the model doesn't have.
    """
    if policy == "none":
        return []
    if (smallest := wrap_size(policy)) is not None:
        return _at_least(model, smallest)
    names = layer_class_names(model) if policy == "auto" else {name.strip() for name in policy.split(",")}
    present = {type(module).__name__ for module in model.modules()}
    if missing := sorted(names - present):
        raise ValueError(
            f"--auto_wrap_policy {', '.join(missing)}: the model has no such layer; "
            f"it has {', '.join(sorted(layer_class_names(model)))}."
        )
    return [module for module in model.modules() if type(module).__name__ in names]


def layer_class_names(model: nn.Module) -> set[str]:
    """Class names of the model's repeated layers: what it says itself, else the elements of its longest list."""
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    present = {type(module).__name__ for module in model.modules()}
    if named & present:
        return named & present
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return {type(layer).__name__ for layer in max(lists, key=len, default=[])}


def of_one_dtype(model: nn.Module, units: list[nn.Module]) -> dict[nn.Module, torch.dtype]:
    """`units`, `model` itself and as many more modules that each is of one dtype -> that dtype; children before parents.

    A router that stays float32 in a bfloat16 layer is gathered alone: flattened parameters must have one dtype. Raises
    ValueError for a module that holds parameters of several itself.
    """
    chosen = set(units)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    main = sizes.most_common(1)[0][0]
    found: dict[nn.Module, torch.dtype] = {}

    def visit(module: nn.Module, outside: torch.dtype) -> None:
        held = {parameter.dtype for parameter in module.parameters(recurse=False)}
        if len(held) > 1:
            named = " and ".join(sorted(str(dtype) for dtype in held))
            raise ValueError(
                f"{type(module).__name__} holds parameters of {named} itself, which can't be sharded together: take "
                "--strategy ddp, or another --precision."
            )
        dtype = next(iter(held), main if module in chosen else outside)
        for child in module.children():
            visit(child, dtype)
        if module in chosen or dtype != outside or module is model:
            found[module] = dtype

    visit(model, main)
    return found


def _at_least(model: nn.Module, minimum: int) -> list[nn.Module]:
    """Modules with `minimum` parameters that no wrapped child holds; a tied parameter stays with all its holders."""
    holders = _holders(model)
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        count = sum(p.numel() for p in module.parameters(recurse=False)) + sum(visit(c) for c in module.children())
        splits_a_tie = any(held < holders[key] for key, held in _holders(module).items())
        if count < minimum or module is model or isinstance(module, LAYER_LISTS) or splits_a_tie:
            return count
        chosen.append(module)
        return 0

    visit(model)
    return chosen


def _holders(module: nn.Module) -> Counter[int]:
    """How many modules in `module` hold a parameter, by its id."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def wrap(
    fabric: Fabric, name: str, model: nn.Module, materialize: Callable[[nn.Module], None], precision: str, how: Sharding
) -> nn.Module:
    """The model on the meta device -> the model on the devices, filled, wrapped and set up by Fabric.

    `materialize(module)` fills the tensors that a module itself holds (loading.Materializer). It is called for the
    modules of a unit just before that unit is sharded.
    """
    if name == "fsdp":
        model = _wrap_fsdp(fabric, model, materialize, precision, how)
    elif name == "fsdp2":
        _wrap_fsdp2(fabric, model, materialize, precision, how)
    else:
        for module in model.modules():
            materialize(module)
    return fabric.setup_module(model, move_to_device=False)


def _wrap_fsdp(
    fabric: Fabric, model: nn.Module, materialize: Callable[[nn.Module], None], precision: str, how: Sharding
) -> nn.Module:
    units = _units(model, how, apart=_unlike_the_outermost)
    if fabric.global_rank == 0 and (wasted := _frozen_beside_trained(units)) > MUCH_WASTED:
        print(
            f"Warning: --strategy fsdp makes gradients of {wasted:,} frozen parameters too, as others of their layers train: "
            "fsdp2 doesn't (docs/fsdp.md).",
            flush=True,
        )
    kept = {"mixed_precision": None}  # what a unit of another dtype than the model's gets: it computes in its own
    policy = {m: kept if dtype != units[model] else True for m, dtype in units.items() if m is not model}
    sharded = fabric.world_size > 1 and how.sharding_strategy != "NO_SHARD"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")  # the user, or a single rank, asked for it
        warnings.filterwarnings("ignore", message=".*requires_grad=True and False")  # such as a router's bias
        return FSDP(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: policy.get(module, False)),
            param_init_fn=materialize,
            sharding_strategy=ShardingStrategy[how.sharding_strategy if sharded else "NO_SHARD"],
            device_mesh=_mesh(fabric, how) if sharded else None,
            mixed_precision=_fsdp_mixed_precision(precision, how.reduce_dtype),
            cpu_offload=CPUOffload(how.cpu_offload and fabric.device.type != "cpu"),  # on a CPU all is there already
            backward_prefetch=None if how.backward_prefetch == "none" else BackwardPrefetch[how.backward_prefetch],
            limit_all_gathers=how.limit_all_gathers,
            device_id=fabric.device,
            use_orig_params=True,
        )


def _units(
    model: nn.Module, how: Sharding, apart: Callable[[nn.Module, list[nn.Module]], set[nn.Module]] = lambda *_: set()
) -> dict[nn.Module, torch.dtype]:
    """The modules that are gathered as one -> their dtype. apart: which others of a model are, beside its units."""
    together = model.together()
    units = [unit for unit in modules_to_wrap(model, how.auto_wrap_policy) if unit not in together]
    return of_one_dtype(model, [*units, *(apart(model, units) - together)])


def _unlike_the_outermost(model: nn.Module, units: list[nn.Module]) -> set[nn.Module]:
    """Modules outside of `units` whose parameters are frozen where most train, or train where most are frozen.

    FSDP1 makes gradients of all that it gathers as one if a part of it trains: with the embeddings frozen, which stay with the
    outermost unit, the last norm would cost the gradients of both.
    """
    inside = {module for unit in units for module in unit.modules()}
    held = {m: own for m in model.modules() if m not in inside and (own := list(m.parameters(recurse=False)))}
    must_stay = [own for module, own in held.items() if module in model.together()] or held.values()
    counts = Counter(id(parameter) for own in held.values() for parameter in own)
    trained = sum(p.numel() * (1 if p.requires_grad else -1) for own in must_stay for p in own) >= 0
    return {
        module
        for module, own in held.items()
        if all(p.requires_grad != trained and counts[id(p)] == 1 for p in own)  # tied weights stay together
    }


def _fsdp_mixed_precision(precision: str, reduce_dtype: str) -> Optional[FSDPMixedPrecision]:
    """Buffers keep their dtypes: RoPE's frequencies are float32, a scale of embeddings may be bfloat16."""
    if precision == "32-true":
        return None
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    return FSDPMixedPrecision(param_dtype=dtype, reduce_dtype=getattr(torch, reduce_dtype), buffer_dtype=None)


def _wrap_fsdp2(
    fabric: Fabric, model: nn.Module, materialize: Callable[[nn.Module], None], precision: str, how: Sharding
) -> None:
    on_gpu = fabric.device.type == "cuda"
    settings: dict[str, Any] = {
        "mesh": _mesh(fabric, how),
        # None: all but the outermost unit, which the backward pass needs first
        "reshard_after_forward": False if how.sharding_strategy == "SHARD_GRAD_OP" else None,
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if how.cpu_offload else OffloadPolicy(),
    }
    mixed = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, how.reduce_dtype), cast_forward_inputs=False
    )
    own = MixedPrecisionPolicy(cast_forward_inputs=False)
    units = _units(model, how)
    for unit, dtype in units.items():
        for module in unit.modules():
            materialize(module)
        fully_shard(unit, mp_policy=own if precision == "32-true" or dtype != units[model] else mixed, **settings)


def _frozen_beside_trained(units: Iterable[nn.Module]) -> int:
    """Frozen parameters that FSDP1 flattens into one tensor with others that train, which then has gradients as a whole.

    units: children before parents.
    """
    count, seen = 0, set()
    for unit in units:
        own = set(unit.parameters()) - seen
        seen |= own
        if any(parameter.requires_grad for parameter in own):
            count += sum(parameter.numel() for parameter in own if not parameter.requires_grad)
    return count


def _mesh(fabric: Fabric, how: Sharding) -> DeviceMesh:
    if how.sharding_strategy == "HYBRID_SHARD":  # shard inside a node, replicate over nodes
        nodes = fabric.world_size // fabric.strategy.num_processes
        shape, names = (nodes, fabric.strategy.num_processes), ("replicate", "shard")
    else:
        shape, names = (fabric.world_size,), ("shard",)
    return init_device_mesh(fabric.device.type, shape, mesh_dim_names=names)


def shard_group(model: nn.Module) -> Optional[ProcessGroup]:
    """The process group that the parameters of a wrapped model are split over, None where ranks hold them whole."""
    root = next((m for m in model.modules() if isinstance(m, FSDP)), None)
    if root is not None:
        return None if root.sharding_strategy == ShardingStrategy.NO_SHARD else root.process_group
    parameter = next(model.parameters())
    return parameter.device_mesh.get_group("shard") if isinstance(parameter, DTensor) else None


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_places(parameters: list[nn.Parameter], group: Optional[ProcessGroup]) -> list[tuple[int, int]]:
    """(index of this rank's first element in the whole parameter, flattened; elements of the whole) of each parameter.

    All ranks call it. group: see `shard_group`. Both FSDPs split in the order of ranks, FSDP2 between rows, so what comes before
    is what lower ranks hold, and no field of theirs is read.
    """
    held = [local_part(parameter).numel() for parameter in parameters]
    if group is None:
        return [(0, count) for count in held]
    counts = torch.tensor(held, device=_communication_device(group))
    all_counts = [torch.empty_like(counts) for _ in range(torch.distributed.get_world_size(group))]
    with waits_for_others("shard_places"):
        torch.distributed.all_gather(all_counts, counts, group=group)
    ends = torch.stack(all_counts).cumsum(0)
    return list(zip((ends[torch.distributed.get_rank(group)] - counts).tolist(), ends[-1].tolist()))


def sum_over_shards(numbers: Tensor, group: Optional[ProcessGroup]) -> Tensor:
    """The sum of what all ranks of a `shard_group` have measured on their parts, on the device of `numbers`."""
    if group is None:
        return numbers
    total = numbers.to(_communication_device(group))  # offloaded gradients are on the CPU, NCCL is not
    torch.distributed.all_reduce(total, group=group)
    return total.to(numbers.device)


def _communication_device(group: ProcessGroup) -> torch.device:
    if torch.distributed.get_backend(group) != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward fsdp and fsdp2 leave the outermost unit whole: split it again.

    Whoever makes such a pass calls this: `model.parameters()` of fsdp2 are others while a unit is whole, and the next pass of
    fsdp would take the whole unit that is there, also where its weights have changed since.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        handle = module._handle if isinstance(module, FSDP) else None
        ran = handle is not None and module._is_root is not None and handle.uses_sharded_strategy
        if ran and not handle.needs_unshard():
            _reshard(module, handle, True)


def original_name(name: str) -> str:
    """A parameter's name in the unwrapped model."""
    for wrapper in ("_forward_module.", "_fsdp_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(wrapper, "")
    return name


def syncs_every_micro_batch(name: str, sums_in_float32: bool) -> bool:
    """False where gradients of earlier micro-batches can wait unreduced: they cost no memory, and stay where they are."""
    return name not in ("ddp", "single") or sums_in_float32
