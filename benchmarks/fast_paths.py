"""The loss head, each way to compute it: time and memory.

    python benchmarks/fast_paths.py --output fast_paths.json

From hidden states to the sum of the losses of all tokens, and the gradients of hidden states and
head. `full` makes the logits of all tokens, as transformers does. `chunked` is this template's
(fabric_llm/model/chunked_loss.py). `torch` is torch.nn.functional.linear_cross_entropy, from torch
2.13. How far they are from float64 is tested: in tests/test_law_13_fast_paths.py, and on a GPU in
tests/test_gpu.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page, turns

if TYPE_CHECKING:
    from torch import Tensor

    # hidden [tokens, size], head [vocabulary, size], targets -> sum
    Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

HEADS = {  # tokens x hidden size x vocabulary
    "smoke": ["64x32x128"],
    "cpu": ["2048x512x8192", "1024x576x49152"],
    "cuda": ["2048x512x8192", "1024x576x49152", "8192x4096x128256"],
}
COLUMNS = {
    "ms": page.step,
    "quartiles": page.spread,
    "times as fast": page.number("times"),
    "additional peak, MiB": page.mebibytes("additional_bytes"),
}
NOTE = (
    "Tokens x hidden size x vocabulary; additional peak: above hidden states, head and targets, so "
    "with both gradients"
)


def main() -> int:
    options = turns.resolve(turns.parser(__doc__))
    rows: list[page.Row] = []
    tables = []
    heads = HEADS["smoke" if options.smoke else options.kind]
    for head, dtype in itertools.product(heads, options.dtypes):
        contenders = []
        for way in LOSSES:
            row = {"name": way, "size": head, "dtype": dtype}
            contenders.append(turns.Contender(options, row, loss_step, way, row, options.kind))
        measured = turns.in_turns(contenders, options)
        table = page.compare(measured, COLUMNS, beside="full")
        tables.append(f"{head} in {dtype}, beside full\n\n{table}")
        rows += measured
    page.write("The loss head", [NOTE], options, "\n\n".join(tables), rows)
    return 0


def loss_step(turns: Any, way: str, row: page.Row, kind: str) -> None:
    import torch

    tokens, hidden_size, vocabulary = map(int, row["size"].split("x"))
    given = {"generator": torch.Generator(kind).manual_seed(0), "device": kind}
    dtype = getattr(torch, row["dtype"])
    hidden = torch.randn(tokens, hidden_size, **given).to(dtype).requires_grad_()
    head = torch.randn(vocabulary, hidden_size, **given) * hidden_size**-0.5
    head = torch.nn.Parameter(head.to(dtype))
    targets = torch.randint(vocabulary, (tokens,), **given)
    loss_of = LOSSES[way](head)
    loss = None
    while turns.go_on(loss):
        loss = loss_of(hidden, head, targets)
        loss.backward()
        loss = loss.detach()
        hidden.grad = head.grad = None


def full(head: Tensor) -> Loss:
    from fabric_llm.model.language_model import token_loss

    return lambda hidden, head, targets: token_loss(hidden @ head.T, targets)


def chunked(head: Tensor) -> Loss:
    """A Llama of one small layer, with this head."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from fabric_llm.model.chunked_loss import Head, chunked_loss
    from fabric_llm.model.language_model import token_loss

    vocabulary, hidden_size = head.shape
    config = LlamaConfig(**inputs.llama(hidden_size, 8, 1, 1), vocab_size=vocabulary)
    with torch.device("meta"):  # only the head is used
        model = AutoModelForCausalLM.from_config(config, dtype=head.dtype)
        ours = Head(model)
        # it learns the class of the outputs
        ours.hidden_states(input_ids=torch.zeros(1, 2, dtype=torch.long))
    model.lm_head.weight = head
    return lambda hidden, head, targets: chunked_loss(ours, token_loss, hidden, targets)


def of_torch(head: Tensor) -> Loss:
    from torch.nn.functional import linear_cross_entropy

    return lambda hidden, head, targets: linear_cross_entropy(
        hidden, head, targets, reduction="sum"
    )


LOSSES = {"full": full, "chunked": chunked, "torch": of_torch}


if __name__ == "__main__":
    sys.exit(main())
