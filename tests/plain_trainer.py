"""A trainer in plain PyTorch, written from docs/: one process, no code of the package.

It gives what law 16 compares every run with. Each document of a row goes through the model alone.
"""

import json
import math
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from plain_order import order, whole
from transformers import AutoModelForCausalLM

IGNORED = -100
ROUNDING = 1e-6  # of a gradient, as a part of the largest element of its tensor
DEFAULTS = {
    **{"max_step": None, "number_epochs": 1, "global_batch_size": 8, "seed": 1234, "freeze": ""},
    **{"lr": 2e-5, "min_lr": 0.0, "lr_schedule": "cosine", "warmup_steps": 0, "decay_steps": None},
    **{"decay_shape": "sqrt", "cooldown_steps": None, "constant_lr": None, "weight_decay": 0.1},
    **{"beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "ema_decay": None, "ema_every": 1},
    "document_masking": True,
}
Document = tuple[torch.Tensor, torch.Tensor]  # ids and labels, each [1, tokens]


class Found(NamedTuple):
    steps: dict[int, dict[str, float]]  # loss, lr and grad_norm of each step
    evaluations: dict[int, dict[str, float]]  # loss of each set, of all "", of the average "ema"
    weights: dict[str, torch.Tensor]
    # How far rounding of each weight's own gradients may have moved it.
    uncertain: dict[str, torch.Tensor]
    tied: dict[str, str] = {}  # any name of a parameter -> its first
    again: Optional[Callable[..., Any]] = None  # trains again; shaken=0, 1 ...: otherwise rounded


def documents(columns: dict[str, Any], manifest: dict[str, Any], masks: bool) -> list[Document]:
    """The documents of a row, or the whole row where they aren't kept apart."""
    ids, end = np.array(columns["input_ids"], dtype=np.int64), manifest.get("eos_token_id")
    labels = np.array(columns.get("labels", ids), dtype=np.int64)
    after_end, none = np.r_[False, ids[:-1] == end], np.zeros(len(ids), dtype=bool)
    padding = after_end & (ids == end) if manifest.get("packing") == "best_fit" else none
    labels[padding] = IGNORED
    begins = after_end & ~padding if manifest.get("packed") and masks else none
    cuts = [0, *begins.nonzero()[0], len(ids)]
    parts = torch.from_numpy(ids), torch.from_numpy(labels)
    return [tuple(part[None, a:b] for part in parts) for a, b in zip(cuts, cuts[1:])]


def loss_of(model: Any, row: list[Document], coefficient: float) -> tuple[Any, Any, int]:
    """(sum of a row's cross-entropies, the same and the routers' loss x targets, its targets)."""
    total, targets, routers = 0.0, 0, []
    more = {"output_router_logits": True} if coefficient else {}
    for ids, labels in row:
        found = model(input_ids=ids, use_cache=False, **more)
        total = total + F.cross_entropy(found.logits[0, :-1], labels[0, 1:], reduction="sum")
        targets += int((labels[0, 1:] != IGNORED).sum())
        routers.append(torch.stack(found.router_logits) if coefficient else None)
    if not coefficient:
        return total, total, targets
    chances = torch.cat(routers, dim=1).softmax(-1).flatten(0, 1)  # [tokens x layers, experts]
    top = chances.topk(model.config.num_experts_per_tok).indices
    chosen = torch.zeros_like(chances).scatter_(1, top, 1.0).mean(0)
    balance = chances.shape[1] * (chosen * chances.mean(0)).sum()
    return total, total + coefficient * balance * targets, targets


def rate(step: int, last: int, flags: dict[str, Any]) -> float:
    """The learning rate after `step` finished steps of `last` (docs/schedules.md)."""
    lr, low, warmup, shape = (flags[n] for n in ("lr", "min_lr", "warmup_steps", "lr_schedule"))
    falls = {"sqrt": lambda x: 1 - x**0.5, "linear": lambda x: 1 - x}
    falls |= {"cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}
    falls |= {"exponential": lambda x: (100 ** (1 - x) - 1) / 99}
    if step < warmup:
        return lr * (step + 1) / warmup
    since, length = step - warmup, max(1, last - warmup)
    if shape in ("cosine", "linear"):
        return low + (lr - low) * falls[shape](since / length)
    if shape == "constant":
        return lr
    if shape == "inverse_sqrt":
        return low + (lr - low) * (max(1, warmup) / (max(1, warmup) + since)) ** 0.5
    decay = max(1, last // 10) if flags["decay_steps"] is None else flags["decay_steps"]
    decay = min(last - warmup, decay)
    part = falls[flags["decay_shape"]](max(0.0, 1 - (last - step) / max(1, decay)))
    if shape == "infinite":
        stable = (lr + low) / 2 if flags["constant_lr"] is None else flags["constant_lr"]
        cooldown = last // 4 if flags["cooldown_steps"] is None else flags["cooldown_steps"]
        down = falls["cosine"](min(1.0, since / max(1, cooldown)))
        part *= (stable - low + (lr - stable) * down) / (lr - low)
    return low + (lr - low) * part


def train(
    flags: dict[str, Any],
    sources: dict[str, str],
    stages: dict[str, dict[str, str]],
    beside: dict[str, str],
    shaken: Optional[int] = None,
) -> Found:
    """Train, and evaluate whole validation splits before step 1 and after each step.

    flags: those of train.py that say what, but for the data. sources, beside: name -> dataset, to
    train on, and to evaluate as well. stages: from which part of the run -> shares of sources.
    shaken: seed of signs by which each gradient is moved, as far as rounding may; no evaluations.
    """
    flags = {**DEFAULTS, **flags}
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(flags["model_name"], **how)
    config = model.config.get_text_config()
    balances = getattr(config, "output_router_logits", False)
    coefficient = config.router_aux_loss_coef if balances else 0.0
    params, frozen = {}, flags["freeze"].split(",")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, one) for one in frozen))
        params |= {name: parameter} if parameter.requires_grad else {}
    zeros = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(3))
    first, second, uncertain = zeros
    ema = {name: p.detach().clone() for name, p in params.items()}
    opened, manifests = {}, {}
    for name, folder in {**sources, **beside}.items():
        opened[name], file = datasets.load_from_disk(folder), Path(folder, "manifest.json")
        manifests[name] = json.loads(file.read_text()) if file.exists() else {}
    batch, rows = flags["global_batch_size"], {name: len(opened[name]["train"]) for name in sources}
    once = flags["number_epochs"] * sum(rows.values())  # of one dataset
    end = math.inf if flags["max_step"] else once
    last = flags["max_step"] or math.ceil(end / batch)
    begins = [(round(Fraction(p) * last) * batch, whole(s, list(rows))) for p, s in stages.items()]
    reads = order(flags["seed"], rows, begins)
    names = {p: name for name, p in model.named_parameters()}
    tied = {name: names[p] for name, p in model.named_parameters(remove_duplicate=False)}
    found = Found({}, {}, {}, uncertain, tied, partial(train, flags, sources, stages, beside))

    def documents_of(name: str, split: str, row: int) -> list[Document]:
        return documents(opened[name][split][row], manifests[name], flags["document_masking"])

    @torch.no_grad()
    def evaluate(weights: list[int]) -> dict[str, float]:
        losses = {}
        for name in opened:
            numbers = range(len(opened[name]["validation"]))
            of_rows = [loss_of(model, documents_of(name, "validation", n), 0) for n in numbers]
            losses[name] = sum(float(one[0]) for one in of_rows) / sum(one[2] for one in of_rows)
        together = sum(losses[name] * weight for name, weight in zip(rows, weights))
        return {**losses, "": together / sum(weights)}

    signs = torch.Generator().manual_seed(shaken or 0)
    if shaken is None:
        found.evaluations[0] = evaluate(begins[0][1])
    for step in range(last):
        read = [next(reads) for _ in range(min(batch, end - step * batch))]
        of_rows, total = [documents_of(name, "train", row) for name, row, _ in read], 0.0
        labels = [labels[0, 1:] for row in of_rows for _, labels in row]
        targets = max(1, sum(int((one != IGNORED).sum()) for one in labels))
        for row in of_rows:
            loss, trained, _ = loss_of(model, row, coefficient)
            (trained / targets).backward()
            total += float(loss.detach()) / targets
        gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        scale = flags["grad_clip"] / (norm + 1e-6) if 0 < flags["grad_clip"] < norm + 1e-6 else 1.0
        lr, b1, b2 = rate(step, last, flags), flags["beta1"], flags["beta2"]
        with torch.no_grad():
            for name, gradient in gradients.items():
                p, g = params[name], gradient * scale
                if shaken is not None:
                    sign = torch.randint(0, 2, g.shape, generator=signs) * 2 - 1
                    g = g + sign * (g != 0) * ROUNDING * g.abs().max()
                p.mul_(1 - lr * flags["weight_decay"] * (p.ndim >= 2))
                first[name].lerp_(g, 1 - b1)
                second[name].mul_(b2).addcmul_(g, g, value=1 - b2)
                size = (second[name] / (1 - b2 ** (step + 1))).sqrt() + 1e-8
                p.sub_(lr * first[name] / (1 - b1 ** (step + 1)) / size)
                share = (ROUNDING * g.abs().max() / size).clamp(max=1.0)  # of the update
                uncertain[name].add_(lr * (g != 0) * share)
            if flags["ema_decay"] and (step + 1) % flags["ema_every"] == 0:
                for name, p in params.items():
                    ema[name].lerp_(p, 1 - flags["ema_decay"] ** flags["ema_every"])
        model.zero_grad()
        found.steps[step + 1] = {"loss": total, "lr": lr, "grad_norm": norm}
        found.weights.update({name: p.detach().clone() for name, p in model.state_dict().items()})
        if shaken is not None:
            continue
        found.evaluations[step + 1] = evaluate(read[-1][2])
        if flags["ema_decay"]:
            model.load_state_dict(ema, strict=False)
            found.evaluations[step + 1]["ema"] = evaluate(read[-1][2])[""]
            model.load_state_dict(found.weights)
    return found
