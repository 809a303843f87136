"""Arguments -> Fabric, and a model -> its wrapped form. Nothing else knows about sharding.

| name   | what it is                                          | a rank holds                    |
|--------|-----------------------------------------------------|---------------------------------|
| fsdp   | FullyShardedDataParallel, Fabric's FSDPStrategy     | a part (see sharding_strategy)  |
| fsdp2  | fully_shard, Fabric's ModelParallelStrategy         | a part                          |
| ddp    | DistributedDataParallel                             | everything                      |
| single | one device, no wrapper                              | everything                      |
| xla    | Fabric's XLAFSDPStrategy, for TPUs                  | a part                          |
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy

from fabric_llm.base import fabric as lightning
from fabric_llm.base.fabric import Fabric
from fabric_llm.model.strategy_rules import Placement, Sharding, wrap_size
from fabric_llm.model.weights import repeated_layers, replacing

Units = dict[nn.Module, torch.dtype]  # what is gathered as one, children before parents
Fill = Callable[[nn.Module], None]


def timeout_of_groups(hang_timeout: float) -> timedelta:
    """How long a process group waits. The watch ends a run that hangs after `hang_timeout` seconds,
    and can say why; a group only aborts it, so it has more time."""
    return timedelta(seconds=2 * hang_timeout + 60)


def make_fabric(placement: Placement, precision: str, timeout_seconds: float = 1800.0) -> Fabric:
    """Fabric for the strategy and devices of a run. Starts nothing: that is `fabric.launch()`.

    timeout_seconds: the patience of processes/watch.py. That of the process group is longer.
    """
    name, kind = placement.strategy, placement.kind
    sizes = {"devices": placement.devices, "num_nodes": placement.num_nodes}
    if name == "xla":
        return Fabric(accelerator="tpu", **sizes, strategy=lightning.XLAFSDPStrategy())
    timeout = timeout_of_groups(timeout_seconds)
    strategy: Any = "auto"
    plugin = lightning.Precision()
    if precision.endswith("-mixed"):
        plugin = lightning.MixedPrecision(precision, device=kind)
    if name == "fsdp":
        strategy = AnyDeviceFSDPStrategy(timeout=timeout)
        plugin = AnyDeviceFSDPPrecision(precision, kind)
    elif name == "fsdp2":
        how = {"data_parallel_size": placement.world_size, "tensor_parallel_size": 1}
        # `wrap` shards the model.
        strategy = lightning.ModelParallelStrategy(
            lambda model, mesh: model, **how, timeout=timeout
        )
    elif name == "ddp":
        # Buffers are constants here; DDP would send them in each forward. torch 2.13 renamed the
        # option.
        known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        strategy = lightning.DDPStrategy(
            gradient_as_bucket_view=True, timeout=timeout, **{sync: False}
        )
    # Ranks come from torchrun, or from launch.py, which knows srun. Fabric would take any SLURM job
    # for srun's.
    environment = lightning.LightningEnvironment()
    if lightning.TorchElasticEnvironment.detect():
        environment = lightning.TorchElasticEnvironment()
    return Fabric(accelerator=kind, **sizes, strategy=strategy, plugins=[plugin, environment])


class AnyDeviceFSDPStrategy(lightning.FSDPStrategy):
    """FSDPStrategy, also on CPU (Fabric refuses the class itself there)."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        # It is as `wrap` made it. Fabric's own would import torchmetrics to look for metrics in it.
        return module


class AnyDeviceFSDPPrecision(lightning.FSDPPrecision):
    """FSDPPrecision that leaves the module as it is (`module.to(bfloat16)` would round RoPE's
    frequencies), also on CPU."""

    def __init__(self, precision: str, kind: str) -> None:
        super().__init__(precision)
        self.kind = kind

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def forward_context(self) -> AbstractContextManager:
        if not self.precision.endswith("-mixed"):
            # FSDP's MixedPrecision, or the dtype of the parameters, says in what is computed.
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return torch.autocast(self.kind, dtype=dtype)


def modules_to_wrap(model: nn.Module, policy: str) -> list[nn.Module]:
    """The modules that are gathered as one. Raises ValueError for a class name that the model
    doesn't have."""
    if policy == "none":
        return []
    if (smallest := wrap_size(policy)) is not None:
        return _at_least(model, smallest)
    # A decoder layer is gathered while it computes, and the next one meanwhile.
    if policy == "auto":
        return list(repeated_layers(model).values())
    names = {name.strip() for name in policy.split(",")}
    modules = [module for module in model.modules() if type(module).__name__ in names]
    if missing := sorted(names - {type(module).__name__ for module in modules}):
        known = sorted({type(layer).__name__ for layer in repeated_layers(model).values()})
        raise ValueError(
            f"--auto_wrap_policy {', '.join(missing)}: the model has no such layer; it has "
            f"{', '.join(known)}."
        )
    return modules


def of_one_dtype(model: nn.Module, units: Collection[nn.Module]) -> Units:
    """{module: dtype} of the modules to gather, each of which has parameters of one dtype: `units`,
    `model` itself and what else is needed for that. Children come before parents.

    A router that stays float32 in a bfloat16 layer is gathered alone: flattened parameters must
    have one dtype. Raises ValueError for a module that holds parameters of several itself.
    """
    # The dtype of most elements is the model's, in which the outermost unit computes.
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    main = max(sizes, key=sizes.__getitem__)
    dtype_of: Units = {}

    def visit(module: nn.Module, outside: torch.dtype) -> None:
        held = {parameter.dtype for parameter in module.parameters(recurse=False)}
        if len(held) > 1:
            raise ValueError(
                f"{type(module).__name__} holds parameters of "
                f"{' and '.join(sorted(map(str, held)))} itself, which can't be "
                "sharded together: take --strategy ddp, or another --precision."
            )
        # A module without parameters of its own goes with the unit that it is in.
        dtype = next(iter(held), main if module in units else outside)
        for child in module.children():
            visit(child, dtype)
        # Added after its children, since units are sharded in this order.
        if module in units or dtype != outside or module is model:
            dtype_of[module] = dtype

    visit(model, main)
    return dtype_of


def _at_least(model: nn.Module, minimum: int) -> list[nn.Module]:
    """Modules with at least `minimum` parameters, without those of wrapped modules inside of them.
    A tied parameter is in one of them only together with all modules that hold it."""

    def holders(module: nn.Module) -> Counter[int]:
        return Counter(
            id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
        )

    # How often the whole model holds each parameter: a tied one several times.
    of_model = holders(model)
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for child in module.children():
            count += visit(child)
        # Lists and dictionaries of modules are never called.
        has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        whole = all(held == of_model[key] for key, held in holders(module).items())
        if count < minimum or module is model or not has_forward or not whole:
            return count
        chosen.append(module)
        # What is gathered here doesn't count for the modules around it.
        return 0

    visit(model)
    return chosen


def wrap(
    fabric: Fabric, name: str, model: nn.Module, fill: Fill, precision: str, how: Sharding
) -> nn.Module:
    """The model, with its parameters on the meta device -> the model on the devices, filled,
    wrapped and set up by Fabric.

    fill: gives the ranks their parts of the weights, see weights.py.
    """
    # Buffers aren't sharded: each rank has them whole.
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(fabric.device)
    # Called just before a strategy shards a module, so that no rank holds the whole model.
    give_memory = replacing(lambda meta: torch.empty_like(meta, device=fabric.device))
    if name in ("fsdp", "fsdp2"):
        units = set(modules_to_wrap(model, how.auto_wrap_policy)) - model.keep_in_root
        if name == "fsdp":
            units |= _unlike_the_outermost(model, units) - model.keep_in_root
        for module in model.tiled:
            # A tiled module makes all of its gradients at once, so it has to be gathered as one.
            if inside := units.intersection(module.modules()):
                units = units - inside | {module}
        shard = _wrap_fsdp if name == "fsdp" else _wrap_fsdp2
        model = shard(fabric, model, of_one_dtype(model, units), give_memory, precision, how)
    else:
        for module in model.modules():
            give_memory(module)
    # DDP would wait for gradients that never come, and raise.
    if name == "ddp" and model.idle:
        fabric.strategy._ddp_kwargs["find_unused_parameters"] = True
    # Weights are read only now: each rank has memory for its own part of them and no more.
    fill(model)
    return fabric.setup_module(model, move_to_device=False)


def _wrap_fsdp(
    fabric: Fabric,
    model: nn.Module,
    dtypes: Units,
    give_memory: Fill,
    precision: str,
    how: Sharding,
) -> nn.Module:
    # A unit whose dtype isn't the model's, such as a float32 router, computes in its own.
    kept = {"mixed_precision": None}
    # True means the settings of the outermost unit, and a dictionary replaces some of them.
    policy: dict[nn.Module, Any] = {}
    for module, dtype in dtypes.items():
        if module is not model:
            policy[module] = dtype == dtypes[model] or kept
    mixed = None
    if precision != "32-true":
        dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
        # Buffers keep their dtypes: RoPE's frequencies are float32, a scale of embeddings may be
        # bfloat16.
        mixed = fsdp.MixedPrecision(
            param_dtype=dtype, reduce_dtype=getattr(torch, how.reduce_dtype), buffer_dtype=None
        )
    # FSDP1 would take NO_SHARD for what is sharded over one rank, and add gradients up over that
    # rank alone.
    one_a_node = how.sharding_strategy == "HYBRID_SHARD" and fabric.strategy.num_processes == 1
    sharding, mesh, prefetch = "NO_SHARD", None, None
    if fabric.world_size > 1 and how.sharding_strategy != "NO_SHARD" and not one_a_node:
        sharding, mesh = how.sharding_strategy, _mesh(fabric, how)
    if how.backward_prefetch != "none":
        prefetch = fsdp.BackwardPrefetch[how.backward_prefetch]
    with warnings.catch_warnings():
        # The user, or a single rank, asked for it.
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        # A unit may hold a frozen parameter, such as a router's bias.
        warnings.filterwarnings("ignore", message=".*requires_grad=True and False")
        return FSDP(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: policy.get(module, False)),
            param_init_fn=give_memory,
            sharding_strategy=fsdp.ShardingStrategy[sharding],
            device_mesh=mesh,
            mixed_precision=mixed,
            # On a CPU all is there already.
            cpu_offload=fsdp.CPUOffload(how.cpu_offload and fabric.device.type != "cpu"),
            backward_prefetch=prefetch,
            limit_all_gathers=how.limit_all_gathers,
            device_id=fabric.device,
            # The optimizer's groups, freezing and checkpoints go by the parameters that the model
            # had.
            use_orig_params=True,
        )


def _unlike_the_outermost(model: nn.Module, units: Collection[nn.Module]) -> set[nn.Module]:
    """Modules outside of `units` whose parameters are frozen where most train, or train where most
    are frozen.

    FSDP1 makes gradients of all that it gathers as one if a part of it trains: with the embeddings
    frozen, which stay with the outermost unit, the last norm would cost the gradients of both.
    """
    inside = {module for unit in units for module in unit.modules()}
    held: dict[nn.Module, list[nn.Parameter]] = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        # Parameters inside of a unit are gathered with that unit.
        if own and module not in inside:
            held[module] = own
    # Whether most elements of the outermost unit train: a positive balance. Where some modules have
    # to stay in it, these decide.
    must_stay = [own for module, own in held.items() if module in model.keep_in_root]
    balance = 0
    for own in must_stay or held.values():
        for parameter in own:
            balance += parameter.numel() if parameter.requires_grad else -parameter.numel()
    unlike = set()
    holders = Counter(id(parameter) for own in held.values() for parameter in own)
    for module, own in held.items():
        differs = all(parameter.requires_grad != (balance >= 0) for parameter in own)
        is_tied = any(holders[id(parameter)] > 1 for parameter in own)
        # Tied weights have to stay in one unit.
        if differs and not is_tied:
            unlike.add(module)
    return unlike


def _wrap_fsdp2(
    fabric: Fabric,
    model: nn.Module,
    dtypes: Units,
    give_memory: Fill,
    precision: str,
    how: Sharding,
) -> nn.Module:
    settings: dict[str, Any] = {"mesh": _mesh(fabric, how)}
    # By default all units but the outermost, which the backward pass needs first.
    if how.sharding_strategy == "SHARD_GRAD_OP":
        settings["reshard_after_forward"] = False
    if how.cpu_offload:
        # Only pinned memory is copied to a GPU while it computes.
        pinned = fabric.device.type == "cuda"
        settings["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=pinned)
    # Inputs keep their dtypes: positions and masks aren't to be rounded.
    own = fsdp.MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed = own
    if precision != "32-true":
        mixed = replace(
            own, param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, how.reduce_dtype)
        )
    # Children come first, as `fully_shard` asks: it leaves out what is sharded already.
    for unit, dtype in dtypes.items():
        # Just before it is sharded, so that only one unit at a time is whole.
        for module in unit.modules():
            give_memory(module)
        fsdp.fully_shard(unit, mp_policy=mixed if dtype == dtypes[model] else own, **settings)
    return model


def _mesh(fabric: Fabric, how: Sharding) -> DeviceMesh:
    # A hybrid shards inside of a node, where links are fast, and replicates over nodes.
    if how.sharding_strategy == "HYBRID_SHARD":
        inside = fabric.strategy.num_processes
        shape = {"replicate": fabric.world_size // inside, "shard": inside}
    else:
        shape = {"shard": fabric.world_size}
    return init_device_mesh(fabric.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def syncs_every_micro_batch(name: str, sums_in_float32: bool) -> bool:
    """Whether gradients are reduced over ranks after each micro-batch, instead of after the last.

    With ddp and single they can wait, since each rank holds them whole anyway, unless float32 sums
    take them out of the parameters.
    """
    return name not in ("ddp", "single") or sums_in_float32
