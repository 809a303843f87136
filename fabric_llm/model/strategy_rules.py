"""The devices of a run, and which strategies, precisions and flags of sharding go together. Nothing
here imports torch."""

import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Optional


@dataclass(frozen=True)
class Sharding:
    """How a model is wrapped. Field meanings: docs/fsdp.md."""

    auto_wrap_policy: str = "auto"
    sharding_strategy: str = "FULL_SHARD"
    limit_all_gathers: bool = True
    cpu_offload: bool = False
    backward_prefetch: str = "BACKWARD_PRE"
    reduce_dtype: str = "float32"


@dataclass(frozen=True)
class Placement:
    """Which devices a run uses, and how the model is spread over them."""

    strategy: str  # a name of the table in model/strategy.py
    sharding: Sharding
    devices: int  # per node
    num_nodes: int
    kind: str  # "cpu" or "cuda"
    context_parallel: int = 1  # ranks side by side that share each row

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes

    def rows_of(self, rank: int) -> dict[str, Any]:
        """Which rows a rank reads, and which part of each: fields of data/batches.Batches."""
        # Consecutive ranks share rows, as in context_parallel.context_group.
        reader, part = divmod(rank, self.context_parallel)
        readers = self.world_size // self.context_parallel
        return {"rank": reader, "world_size": readers, "part": part, "parts": self.context_parallel}


def strategy(
    name: str,
    world_size: Optional[int],
    tpu: bool,
    precision: str,
    kind: Optional[str],
    sharding: Sharding,
) -> str:
    """The strategy's name for `auto`, checked against the rest. Raises ValueError where they don't
    go together.

    world_size, kind ("cpu" or "cuda"): None where they aren't known yet; what depends on them isn't
    checked then.
    """
    # XLA brings a strategy of its own, so the rules below don't concern it.
    if tpu:
        if importlib.util.find_spec("torch_xla") is None:
            raise ValueError(
                "--tpu true needs the package torch_xla, which isn't installed on this machine."
            )
        return "xla"
    if name == "auto" and world_size is not None:
        name = "fsdp" if world_size > 1 else "single"
    # DDP of one rank would only copy gradients into its buckets.
    elif name == "ddp" and world_size == 1:
        name = "single"
    if precision == "16-mixed" and kind == "cpu":
        raise ValueError("--precision 16-mixed needs a GPU; on a CPU take bf16-mixed or 32-true.")
    if name == "fsdp2" and precision == "16-mixed":
        raise ValueError(
            "--precision 16-mixed doesn't go with --strategy fsdp2; take bf16-mixed, or "
            "--strategy fsdp."
        )
    if name == "fsdp2" and sharding.sharding_strategy == "NO_SHARD":
        raise ValueError(
            "--sharding_strategy NO_SHARD doesn't go with --strategy fsdp2; --strategy ddp is the "
            "same."
        )
    if sharding.cpu_offload and name in ("ddp", "single"):
        raise ValueError(f"--cpu_offload true needs --strategy fsdp or fsdp2; here it is {name}.")
    # Called for the error that it raises.
    wrap_size(sharding.auto_wrap_policy)
    return name


def wrap_size(policy: str) -> Optional[int]:
    """The parameters of an --auto_wrap_policy size:N, None for another. Raises ValueError."""
    if not policy.startswith("size:"):
        return None
    # Through float, so that 1e8 is a number as well. "inf" overflows.
    with suppress(ValueError, OverflowError):
        if (count := int(float(policy.removeprefix("size:")))) >= 1:
            return count
    raise ValueError(
        f"--auto_wrap_policy {policy}: after 'size:' comes a number of parameters, such as "
        "size:1e8."
    )


def offload(strategy: str, cpu_offload: bool, micro_batches: int) -> None:
    """FSDP1 overwrites the offloaded gradient of the micro-batch before, without a word."""
    if strategy == "fsdp" and cpu_offload and micro_batches > 1:
        raise ValueError(
            f"--cpu_offload true with --strategy fsdp can't accumulate gradients ({micro_batches} "
            "micro-batches a step): take --strategy fsdp2, or a larger --micro_batch_size."
        )
