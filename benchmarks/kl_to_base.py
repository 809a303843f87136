"""For `--code`: replayed rows teach what the base model predicts, by the KL divergence from it, and
the others their text (Li and Hoiem 2016, Learning without Forgetting, arXiv 1606.09282)."""

from functools import cache
from typing import Any

import datasets
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fabric_llm.base import register
from fabric_llm.base.register import option


@register.flags
class Taught:
    """KL to the base model"""

    base: str = option("")
    """folder of the base model"""
    taught_rows: str = option("")
    """dataset of the replayed rows"""


class Llama(LlamaForCausalLM):
    """Keeps what its last step in training was given, since a loss gets none of it."""

    given: dict[str, Any] = {}
    attention = ""

    def forward(self, input_ids: Any, position_ids: Any = None, **more: Any) -> Any:
        given = {"input_ids": input_ids, "position_ids": position_ids, **more}
        if torch.is_grad_enabled():
            Llama.given, Llama.attention = given, self.config._attn_implementation
        return super().forward(**given)


AutoModelForCausalLM.register(LlamaConfig, Llama, exist_ok=True)


@register.loss(adds=["kl"])
def loss(logits: Any, targets: Any, flags: Any) -> Any:
    rows = Llama.given["input_ids"]
    known = replayed(flags.own.taught_rows)
    is_replayed = torch.tensor([row.numpy().tobytes() in known for row in rows])
    taught = is_replayed.repeat_interleave(rows.shape[1]) & (targets != -100)
    with torch.no_grad():
        of_base = base(flags.own.base)(**Llama.given).logits.flatten(0, 1)
    parts = (logits[taught].log_softmax(-1), of_base[taught].log_softmax(-1))
    kl = F.kl_div(*parts, reduction="sum", log_target=True)
    text = targets.masked_fill(taught, -100)
    return F.cross_entropy(logits, text, ignore_index=-100, reduction="sum") + kl, kl


@cache
def base(folder: str) -> Any:
    # With the attention that `given` is made for.
    return LlamaForCausalLM.from_pretrained(folder, attn_implementation=Llama.attention)


@cache
def replayed(folder: str) -> set[bytes]:
    rows = datasets.load_from_disk(f"{folder}/train").with_format("numpy")["input_ids"]
    return {row.astype("int64").tobytes() for row in rows[:]}
