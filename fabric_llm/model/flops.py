"""How many floating-point operations a training step needs, and how many a device can do in a
second.

Counted as in Chowdhery et al. (2022), PaLM, https://arxiv.org/abs/2204.02311, appendix B: a
multiplication and an addition are two operations, the backward pass takes twice the forward pass,
and what activation checkpointing computes again doesn't count. Different from there, attention
counts the pairs of tokens that see each other, and no others: those of one document, each token and
the ones before it. PaLM counts all pairs of a row, which are twice as many for a row of one
document. What the state of a recurrent layer (Mamba, linear attention) takes isn't counted, only
its matrices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from fabric_llm.model.weights import repeated_layers

OF_TRAINING = 3  # forward once, backward twice
WITHOUT_GRADIENT = 2 / 3  # of these: a frozen matrix passes gradients on and has none itself
FORWARD = 1 / 3  # of these: no gradient comes to the layers before the first weight that trains
# Names that configurations have for the number of experts, and for how many a token goes through.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k")

# Dense bfloat16 peak of one device in TFLOP/s, without sparsity, from NVIDIA's data sheets (AMD's
# for MI); float16 where there is no bfloat16 (V100, T4). Of the words that are in a device's name,
# the longest apply.
PEAK_TFLOPS = {
    2500: ("GB200",),
    2250: ("B200",),
    1307: ("MI300X", "MI325X"),
    989: ("H100", "GH200", "H200", "H800"),
    835: ("H100 NVL", "H200 NVL"),
    756: ("H100 PCIe", "H800 PCIe"),
    364: ("RTX 6000 Ada",),
    362: ("L40S",),
    312: ("A100", "A800"),
    210: ("RTX 5090",),
    181: ("L40",),
    165: ("A30", "RTX 4090"),
    155: ("RTX A6000",),
    150: ("A40",),
    148: ("H20",),
    147: ("RTX 4090 D",),
    125: ("A10", "V100"),
    121: ("L4",),
    112: ("V100-PCIE",),
    71: ("RTX 3090",),
    70: ("A10G",),
    65: ("T4",),
}
# Words for a part of a device, or for a slower one, whose peak isn't that of the full device.
PARTS = ("MIG", "Laptop", "Max-Q")


def peak_tflops(device_name: str) -> Optional[float]:
    """Dense bfloat16 peak of the device that torch.cuda.get_device_name names so; None for one that
    isn't known."""

    # Whole words only: an A10G isn't an A10.
    def has(words: str) -> bool:
        return (
            re.search(rf"(?<![A-Za-z0-9]){re.escape(words)}(?![A-Za-z0-9])", device_name)
            is not None
        )

    known = {}
    for peak, devices in PEAK_TFLOPS.items():
        for words in devices:
            if has(words):
                known[words] = float(peak)
    if not known or any(map(has, PARTS)):
        return None
    # The longest name is the most exact: "H100 PCIe" also contains "H100".
    return known[max(known, key=len)]


@dataclass(frozen=True)
class Flops:
    """Operations of forward and backward pass."""

    of_token: float  # for a token, of all matrices that it is multiplied with
    # Window of layers in tokens, None without one -> operations, in all layers with such a window,
    # for a pair of tokens of which one sees the other.
    of_pair: dict[Optional[int], float]

    def of(self, tokens_at: np.ndarray) -> float:
        """Operations for tokens of which `tokens_at[k]` have k tokens of their document before
        them, int64 [context]."""
        total = float(tokens_at.sum()) * self.of_token
        # A token sees those before it and itself, and at most as many as the window has.
        sees = np.arange(1, len(tokens_at) + 1)
        for window, flops in self.of_pair.items():
            seen = sees if window is None else np.minimum(sees, window)
            total += float(tokens_at @ seen) * flops
        return total

    def of_row(self, context: int) -> float:
        """Operations for a row of one document."""
        total = context * self.of_token
        for window, flops in self.of_pair.items():
            seen = context if window is None else min(window, context)
            # The first `seen` tokens see 1, 2, ... tokens, and all later ones a full window.
            total += (seen * (seen + 1) // 2 + (context - seen) * seen) * flops
        return total


def of_model(causal_lm: PreTrainedModel) -> Flops:
    """The operations of a model, which may be on the meta device.

    Each token is multiplied with all matrices but the embeddings, and of the experts with those
    that are chosen. The output layer counts, also where it is tied to the embedding. A frozen
    matrix counts for two thirds, and for one third in a layer that no gradient comes to.
    """
    config = causal_lm.config.get_text_config()
    experts, chosen = experts_of(config)
    layers = list(repeated_layers(causal_lm))
    first = first_with_gradient(causal_lm, layers)
    without = tuple(f"{name}." for name in layers[:first])
    multiplied = 0.0
    # Asked of each module by itself, so that a tied output layer counts although its embedding
    # doesn't.
    for path, module in causal_lm.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            # Vectors aren't multiplied as matrices, and an embedding is only looked up.
            if (
                parameter.ndim > 1
                and not name.endswith("bias")
                and not isinstance(module, nn.Embedding)
            ):
                # Experts are modules in a list of that name, or one parameter with a dimension for
                # the experts.
                is_expert = (
                    "experts" in path.split(".")
                    or parameter.ndim == 3
                    and len(parameter) == experts
                )
                passes = 1.0 if parameter.requires_grad else WITHOUT_GRADIENT
                if f"{path}.".startswith(without):
                    passes = FORWARD
                multiplied += parameter.numel() * (chosen / experts if is_expert else 1.0) * passes
    # A pair takes one product for its score and one for the value that is passed on.
    of_pair: dict[Optional[int], float] = {}
    seen, parts = windows(config), of_layers(config)
    # Which layer has which window is known where all layers have attention.
    if len(seen) != len(layers):
        first = 0
    for number, window in enumerate(seen):
        passes = FORWARD if number < first else 1.0
        of_pair.setdefault(window, 0.0)
        of_pair[window] += OF_TRAINING * 2 * sum(head_dims(parts[number])) * passes
    return Flops(OF_TRAINING * 2 * multiplied, of_pair)


def first_with_gradient(causal_lm: PreTrainedModel, layers: Sequence[str]) -> int:
    """The number of the first of the `layers` that a backward pass goes through, or of all layers
    if only what is behind them trains."""
    behind = 0  # the number of layers that came so far
    # In the order of the model: what comes before the layers stands before them, and a weight that
    # is tied is met where it is used first.
    for name, parameter in causal_lm.named_parameters():
        here = [number for number, layer in enumerate(layers) if name.startswith(f"{layer}.")]
        if parameter.requires_grad:
            return here[0] if here else behind
        if here:
            behind = here[0] + 1
    return 0


def experts_of(config: Any) -> tuple[int, int]:
    """(experts of a layer, those that each token goes through); 1, 1 where the configuration
    doesn't say."""

    # DBRX has its experts in a configuration of its own, ffn_config.
    def first_of(names: Sequence[str]) -> Optional[int]:
        for part in (*(of_layers(config) or [config]), getattr(config, "ffn_config", None)):
            for name in names:
                value = getattr(part, name, None)
                if isinstance(value, int) and value > 0:
                    return value
        return None

    experts, chosen = first_of(EXPERTS), first_of(CHOSEN)
    if experts is None or chosen is None:
        return 1, 1
    return experts, chosen


def windows(config: Any) -> list[Optional[int]]:
    """For each layer with attention, how many tokens see each other in it: None for all."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    parts = of_layers(config)

    def size_of(part: Any, name: str) -> Optional[int]:
        size = getattr(part, name, None)
        return size if isinstance(size, int) and size > 0 else None

    # Without kinds all layers are alike: with attention, or, in Mamba, without.
    if kinds is None:
        has_attention = parts and getattr(parts[0], "num_attention_heads", None)
        return [size_of(part, "sliding_window") for part in parts] if has_attention else []
    local = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    result = []
    for kind, part in zip(kinds, parts):
        # Linear attention compares no pairs of tokens. Hybrid layers have attention as well.
        compares_pairs = "attention" in kind and "linear" not in kind
        if compares_pairs or kind == "hybrid":
            result.append(size_of(part, local.get(kind, "")))
    return result


def of_layers(config: Any) -> list[Any]:
    """The configuration of each layer. In Gemma 4 they differ, and the model's own raises
    RuntimeError where it is asked for what differs."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * getattr(config, "num_hidden_layers", 0)


def head_dims(config: Any) -> tuple[int, int]:
    """(elements of a token's query, elements of its value), of all heads together.

    (0, 0), so that pairs aren't counted, where the configuration doesn't have these numbers, or has
    others for each layer.
    """
    # Some families have a list with a number for each layer, which isn't an int.
    heads, width, size = (
        getattr(config, name, None) for name in ("num_attention_heads", "hidden_size", "head_dim")
    )
    if not isinstance(heads, int) or heads < 1 or not isinstance(size or width, int):
        return 0, 0
    size = size or width // heads
    values = getattr(config, "v_head_dim", None) or size
    if getattr(config, "qk_nope_head_dim", None) is not None:  # multi-head latent attention
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
    return heads * size, heads * values
