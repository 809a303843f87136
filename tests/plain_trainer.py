"""A trainer in plain PyTorch, written from docs/ alone: one process, one document at a time, no code of the package.

`train(flags)` takes what says what is trained, in the names of train.py, and gives what law 16 compares every run with.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

IGNORED, WORD = -100, 2**64
ROUNDING = 1e-6  # of a gradient, as a part of the largest element of its tensor
DEFAULTS = {
    **{"max_step": None, "number_epochs": 1, "global_batch_size": 8, "seed": 1234, "document_masking": True, "freeze": ""},
    **{"lr": 2e-5, "min_lr": 0.0, "lr_schedule": "cosine", "warmup_steps": 0, "decay_steps": None, "decay_shape": "sqrt"},
    **{"cooldown_steps": None, "constant_lr": None, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0},
    **{"ema_decay": None, "ema_every": 1},
}
Document = tuple[torch.Tensor, torch.Tensor]  # ids and labels, each [1, tokens]


class Found(NamedTuple):
    steps: dict[int, dict[str, float]]  # loss, lr and grad_norm of each step
    evaluations: dict[int, dict[str, float]]  # loss of each set; of the average of the weights under "ema"
    weights: dict[str, torch.Tensor]
    uncertain: dict[str, torch.Tensor]  # how far rounding of the gradients may have moved each weight


# ------------------------------------------------------------------------------- the order of the rows (docs/data.md)


def mixed(x: int) -> int:
    """splitmix64"""
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def key(*parts: int) -> int:
    found = 0
    for part in parts:
        found = mixed((found + part) % WORD)
    return found


def row_at(place: int, rows: int, seed: int) -> int:
    """The row that is read at a place of a dataset's order: a Feistel network, walked until it comes to a row."""
    epoch, row = divmod(place, rows)
    bits = max((rows - 1).bit_length(), 6)
    low, high = bits // 2, bits - bits // 2
    while True:
        left, right = row >> low, row & (2**low - 1)
        for number in range(8):
            of_round = mixed((key(seed, epoch) + number) % WORD)
            left, right = right, (left ^ mixed((right + of_round) % WORD)) & (2 ** (low if number % 2 else high) - 1)
        row = left << low | right
        if row < rows:
            return row


def pattern(weights: list[int]) -> list[int]:
    """The source of each slot of a period: of those whose window has begun, the one whose window ends first."""
    length, taken, slots = sum(weights), [0] * len(weights), []
    for slot in range(length):
        open_now = [i for i, w in enumerate(weights) if taken[i] < w and taken[i] * length // w <= slot]
        due = min(open_now, key=lambda i: (-(-(taken[i] + 1) * length // weights[i]), i))
        slots.append(due)
        taken[due] += 1
    return slots


def whole(shares: dict[str, str], names: list[str]) -> list[int]:
    """The smallest integers in the proportion of decimals."""
    parts = [Fraction(str(shares.get(name, 0))) for name in names]
    parts = [part / sum(parts) for part in parts]
    return [int(part * math.lcm(*(one.denominator for one in parts))) for part in parts]


def order(seed: int, rows: dict[str, int], stages: list[tuple[int, list[int]]]) -> Iterator[tuple[str, int, list[int]]]:
    """(source, row, weights of the stage) at each position."""
    names, count, seeds = list(rows), dict.fromkeys(rows, 0), {}
    for name in names:
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        seeds[name] = key(seed, number) if len(names) > 1 else seed
    for position in itertools.count():
        begins, weights = [stage for stage in stages if stage[0] <= position][-1]
        slots = pattern(weights)
        name = names[slots[(position - begins) % len(slots)]]
        yield name, row_at(count[name], rows[name], seeds[name]), weights
        count[name] += 1


# ------------------------------------------------------------------------------- rows, loss, schedule


def documents(columns: dict[str, Any], manifest: dict[str, Any], masks: bool) -> list[Document]:
    """The documents of a row, or the whole row where they aren't kept apart."""
    ids, end = np.array(columns["input_ids"], dtype=np.int64), manifest.get("eos_token_id")
    labels, after_end = np.array(columns.get("labels", ids), dtype=np.int64), np.r_[False, ids[:-1] == end]
    padding = after_end & (ids == end) if manifest.get("packing") == "best_fit" else np.zeros(len(ids), dtype=bool)
    labels[padding] = IGNORED
    begins = after_end & ~padding if manifest.get("packed") and masks else np.zeros(len(ids), dtype=bool)
    cuts = [0, *begins.nonzero()[0], len(ids)]
    return [tuple(torch.from_numpy(x[a:b])[None] for x in (ids, labels)) for a, b in zip(cuts, cuts[1:])]


def loss_of(model: Any, row: list[Document], coefficient: float) -> tuple[Any, Any, int]:
    """(cross-entropies of a row added up, the same with the routers' loss times the row's targets, its targets)."""
    total, targets, routers = 0.0, 0, []
    for ids, labels in row:
        found = model(input_ids=ids, use_cache=False, **({"output_router_logits": True} if coefficient else {}))
        total = total + F.cross_entropy(found.logits[0, :-1].float(), labels[0, 1:], reduction="sum")
        targets += int((labels[0, 1:] != IGNORED).sum())
        routers.append(torch.stack(found.router_logits) if coefficient else None)
    if not coefficient:
        return total, total, targets
    chances = torch.cat(routers, dim=1).softmax(-1).flatten(0, 1)  # of all tokens in all layers: [tokens, experts]
    top = chances.topk(model.config.num_experts_per_tok).indices
    chosen = torch.zeros_like(chances).scatter_(1, top, 1.0).mean(0)
    balance = chances.shape[1] * (chosen * chances.mean(0)).sum()
    return total, total + coefficient * balance * targets, targets


def rate(step: int, last: int, flags: dict[str, Any]) -> float:
    """The learning rate after `step` finished steps of `last` (docs/schedules.md)."""
    lr, low, warmup, shape = (flags[name] for name in ("lr", "min_lr", "warmup_steps", "lr_schedule"))
    falls = {"sqrt": lambda x: 1 - x**0.5, "linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}
    falls["exponential"] = lambda x: (100 ** (1 - x) - 1) / 99
    if step < warmup:
        return lr * (step + 1) / warmup
    since, length = step - warmup, max(1, last - warmup)
    if shape in ("cosine", "linear"):
        return low + (lr - low) * falls[shape](since / length)
    if shape == "constant":
        return lr
    if shape == "inverse_sqrt":
        return low + (lr - low) * (max(1, warmup) / (max(1, warmup) + since)) ** 0.5
    decay = min(last - warmup, max(1, last // 10) if flags["decay_steps"] is None else flags["decay_steps"])
    part = falls[flags["decay_shape"]](max(0.0, 1 - (last - step) / max(1, decay)))
    if shape == "infinite":
        stable = (lr + low) / 2 if flags["constant_lr"] is None else flags["constant_lr"]
        cooldown = max(1, last // 4 if flags["cooldown_steps"] is None else flags["cooldown_steps"])
        part *= (stable - low + (lr - stable) * falls["cosine"](min(1.0, since / cooldown))) / (lr - low)
    return low + (lr - low) * part


# ------------------------------------------------------------------------------- the run


def train(flags: dict[str, Any], sources: dict[str, str], stages: dict[str, dict[str, str]], beside: dict[str, str]) -> Found:
    """Train, and evaluate whole validation splits before step 1 and after each step.

    flags: of train.py, those that say what, but for the data. sources, beside: name -> folder of the datasets to train on, and of
    those that are evaluated as well. stages: part of the run at which it begins -> share of each source.
    """
    flags = {**DEFAULTS, **flags}
    model = AutoModelForCausalLM.from_pretrained(flags["model_name"], dtype=torch.float32, attn_implementation="eager")
    config = model.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", 0) if getattr(config, "output_router_logits", False) else 0
    params = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, one) for one in flags["freeze"].split(",")))
        params |= {name: parameter} if parameter.requires_grad else {}
    first, second, uncertain = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(3))
    ema = {name: p.detach().clone() for name, p in params.items()}
    opened = {name: datasets.load_from_disk(folder) for name, folder in {**sources, **beside}.items()}
    manifests = {name: Path(folder, "manifest.json") for name, folder in {**sources, **beside}.items()}
    manifests = {name: json.loads(file.read_text()) if file.exists() else {} for name, file in manifests.items()}
    batch, rows = flags["global_batch_size"], {name: len(opened[name]["train"]) for name in sources}
    end = math.inf if flags["max_step"] else flags["number_epochs"] * sum(rows.values())  # of one dataset
    last = flags["max_step"] or math.ceil(end / batch)
    begins = [(round(Fraction(part) * last) * batch, whole(shares, list(rows))) for part, shares in stages.items()]
    reads, found = order(flags["seed"], rows, begins), Found({}, {}, {}, uncertain)

    def documents_of(name: str, split: str, row: int) -> list[Document]:
        return documents(opened[name][split][row], manifests[name], flags["document_masking"])

    @torch.no_grad()
    def evaluate(weights: list[int]) -> dict[str, float]:
        losses = {}
        for name in opened:
            numbers = range(len(opened[name]["validation"]))
            of_rows = [loss_of(model, documents_of(name, "validation", number), 0) for number in numbers]
            losses[name] = sum(float(one[0]) for one in of_rows) / sum(one[2] for one in of_rows)
        return {**losses, "": sum(losses[name] * weight for name, weight in zip(rows, weights)) / sum(weights)}

    found.evaluations[0] = evaluate(begins[0][1])
    for step in range(last):
        read = [next(reads) for _ in range(min(batch, end - step * batch))]
        of_rows, total = [documents_of(name, "train", row) for name, row, _ in read], 0.0
        targets = max(1, sum(int((labels[0, 1:] != IGNORED).sum()) for row in of_rows for _, labels in row))
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
                p.mul_(1 - lr * flags["weight_decay"] * (p.ndim >= 2))
                first[name].lerp_(g, 1 - b1)
                second[name].mul_(b2).addcmul_(g, g, value=1 - b2)
                size = (second[name] / (1 - b2 ** (step + 1))).sqrt() + 1e-8
                p.sub_(lr * first[name] / (1 - b1 ** (step + 1)) / size)
                uncertain[name].add_(lr * (g != 0) * (ROUNDING * g.abs().max() / size).clamp(max=1.0))
            for name, p in params.items() if flags["ema_decay"] and (step + 1) % flags["ema_every"] == 0 else ():
                ema[name].lerp_(p, 1 - flags["ema_decay"] ** flags["ema_every"])
        model.zero_grad()
        found.steps[step + 1] = {"loss": total, "lr": lr, "grad_norm": norm}
        found.evaluations[step + 1] = evaluate(read[-1][2])
        found.weights.update({name: p.detach().clone() for name, p in model.state_dict().items()})
        if flags["ema_decay"]:
            model.load_state_dict(ema, strict=False)
            found.evaluations[step + 1]["ema"] = evaluate(read[-1][2])[""]
            model.load_state_dict(found.weights)
    return found
