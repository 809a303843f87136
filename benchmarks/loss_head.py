"""From hidden states to the loss and its gradients: time, memory and error of each way to do it.

    python benchmarks/loss_head.py --output loss_head.json

`full` makes the logits of all tokens, as transformers does. `chunked` is this template's
(fabric_llm/model/loss_head.py). `torch` is torch.nn.functional.linear_cross_entropy, from torch 2.13. `liger` and
`cce` (cut_cross_entropy) are GPU kernels, where their packages are installed. A step is the sum of the losses of all
tokens, and the gradients of hidden states and head. Errors are relative, in the L2 norm, against float64 on the same
inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page, turns  # noqa: E402
from benchmarks.turns import NotHere  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [tokens, size], head [vocabulary, size], targets -> sum

SIZES = {  # tokens x hidden size x vocabulary
    "smoke": ["64x32x128"],
    "cpu": ["2048x512x8192", "1024x576x49152"],
    "cuda": ["2048x512x8192", "1024x576x49152", "8192x4096x128256"],
}
EXACT_TOKENS = 256  # at once, in float64
COLUMNS = {
    **{"ms": page.step, "quartiles": page.spread, "times as fast as full": page.number("times")},
    "additional peak, MiB": page.mebibytes("additional_bytes"),
    "error of loss": page.number("loss_error", ".1e"),
    "of hidden states'": page.number("hidden_error", ".1e"),
    "of head's gradient": page.number("head_error", ".1e"),
}


def main(argv: Optional[list[str]] = None) -> int:
    options = turns.resolve(turns.parser(__doc__), argv)
    rows: list[page.Row] = []
    tables = []
    for size in SIZES["smoke" if options.smoke else options.kind]:
        for dtype in options.dtypes:
            known, given = {"size": size, "dtype": dtype}, (tuple(map(int, size.split("x"))), dtype, options.kind)
            contenders = [turns.Contender(options, {"name": way, **known}, step, way, *given) for way in WAYS]
            rows += (found := turns.in_turns(contenders, options))
            tables.append(f"{size} in {dtype}\n\n{page.compare(found, COLUMNS, beside='full')}")
    notes = [
        "Sizes: tokens x hidden size x vocabulary",
        "Additional peak: above hidden states, head and targets, so with both gradients",
        "Errors: of the loss, of the gradient of the hidden states, and of that of the head, against float64",
    ]
    page.write("loss_head.py", "The loss head", notes, options, "\n\n".join(tables), rows)
    return 0


def step(turns: Any, way: str, size: tuple[int, int, int], dtype: str, kind: str) -> None:
    import torch

    tokens, hidden_size, vocabulary = size
    generator = torch.Generator(kind).manual_seed(0)
    given = {"generator": generator, "device": kind}
    hidden = torch.randn(tokens, hidden_size, **given).to(getattr(torch, dtype)).requires_grad_()
    head = torch.nn.Parameter((torch.randn(vocabulary, hidden_size, **given) * hidden_size**-0.5).to(hidden.dtype))
    targets = torch.randint(vocabulary, (tokens,), **given)
    loss_of = WAYS[way](hidden, head)
    turns.said = errors(loss_of, hidden, head, targets)
    loss = None
    while turns.go_on(loss):
        loss = loss_of(hidden, head, targets)
        loss.backward()
        loss = loss.detach()
        hidden.grad = head.grad = None


def errors(loss_of: Way, hidden: Tensor, head: Tensor, targets: Tensor) -> dict[str, float]:
    """Of the loss and its gradients against float64, as parts of their norms."""
    loss = loss_of(hidden, head, targets)
    loss.backward()
    pairs = zip((loss.detach(), hidden.grad, head.grad), in_float64(hidden, head, targets))
    found = [((ours.double() - exact).norm() / exact.norm()).item() for ours, exact in pairs]
    hidden.grad = head.grad = None
    return dict(zip(("loss_error", "hidden_error", "head_error"), found))


def in_float64(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of the hidden states, gradient of the head), some tokens at a time."""
    import torch

    exact_head = head.detach().double().requires_grad_()
    exact_hidden = hidden.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for part, part_targets in zip(exact_hidden.split(EXACT_TOKENS), targets.split(EXACT_TOKENS)):
        loss = torch.nn.functional.cross_entropy(part @ exact_head.T, part_targets, reduction="sum")
        loss.backward()
        total += loss.detach()
    return total, exact_hidden.grad, exact_head.grad


def full(hidden: Tensor, head: Tensor) -> Way:
    from fabric_llm.model.language_model import token_loss

    return lambda hidden, head, targets: token_loss(hidden @ head.T, targets)


def chunked(hidden: Tensor, head: Tensor) -> Way:
    """A Llama of one small layer, with this head."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from fabric_llm.model.language_model import token_loss
    from fabric_llm.model.loss_head import Head, chunked_loss

    vocabulary, hidden_size = head.shape
    shape = {"num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 1, "tie_word_embeddings": False}
    config = LlamaConfig(hidden_size=hidden_size, vocab_size=vocabulary, **shape)
    with torch.device("meta"):  # only the head is used
        model = AutoModelForCausalLM.from_config(config, dtype=head.dtype)
        ours = Head(model)
        ours.hidden_states(input_ids=torch.zeros(1, 2, dtype=torch.long))  # it learns the class of the outputs
    model.lm_head.weight = head
    return lambda hidden, head, targets: chunked_loss(ours, token_loss, hidden, targets)


def of_torch(hidden: Tensor, head: Tensor) -> Way:
    import torch

    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise NotHere("torch has it from 2.13 on")
    return lambda hidden, head, targets: function(hidden, head, targets, reduction="sum")


def liger(hidden: Tensor, head: Tensor) -> Way:
    require_gpu(hidden)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda hidden, head, targets: function(head, hidden, targets)


def cce(hidden: Tensor, head: Tensor) -> Way:
    require_gpu(hidden)
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, head, targets: linear_cross_entropy(hidden, head, targets, reduction="sum")


def require_gpu(hidden: Tensor) -> None:
    if not hidden.is_cuda:
        raise NotHere("needs a GPU")


WAYS = {"full": full, "chunked": chunked, "torch": of_torch, "liger": liger, "cce": cce}


if __name__ == "__main__":
    sys.exit(main())
