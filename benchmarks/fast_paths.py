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
from typing import TYPE_CHECKING, Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import page, turns

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
    **{"ms": page.step, "quartiles": page.spread, "times as fast": page.number("times")},
    "additional peak, MiB": page.mebibytes("additional_bytes"),
}


def main(argv: Optional[list[str]] = None) -> int:
    options = turns.resolve(turns.parser(__doc__), argv)
    rows: list[page.Row] = []
    tables = []
    for head, dtype in itertools.product(
        HEADS["smoke" if options.smoke else options.kind], options.dtypes
    ):
        given = tuple(map(int, head.split("x"))), dtype, options.kind
        known = {"size": head, "dtype": dtype}
        contenders = [
            turns.Contender(options, {"name": way, **known}, loss_step, way, *given)
            for way in LOSSES
        ]
        rows += turns.in_turns(contenders, options)
        table = page.compare(rows[-len(LOSSES) :], COLUMNS, beside="full")
        tables.append(f"{head} in {dtype}, beside full\n\n{table}")
    notes = [
        (
            "Tokens x hidden size x vocabulary; additional peak: above hidden states, head and "
            "targets, so with both gradients"
        )
    ]
    page.write("fast_paths.py", "The loss head", notes, options, "\n\n".join(tables), rows)
    return 0


def loss_step(turns: Any, way: str, size: tuple[int, int, int], dtype: str, kind: str) -> None:
    import torch

    tokens, hidden_size, vocabulary = size
    generator = torch.Generator(kind).manual_seed(0)
    given = {"generator": generator, "device": kind}
    hidden = torch.randn(tokens, hidden_size, **given).to(getattr(torch, dtype)).requires_grad_()
    head = torch.nn.Parameter(
        (torch.randn(vocabulary, hidden_size, **given) * hidden_size**-0.5).to(hidden.dtype)
    )
    targets = torch.randint(vocabulary, (tokens,), **given)
    loss_of = LOSSES[way](hidden, head)
    loss = None
    while turns.go_on(loss):
        loss = loss_of(hidden, head, targets)
        loss.backward()
        loss = loss.detach()
        hidden.grad = head.grad = None


def full(hidden: Tensor, head: Tensor) -> Loss:
    from fabric_llm.model.language_model import token_loss

    return lambda hidden, head, targets: token_loss(hidden @ head.T, targets)


def chunked(hidden: Tensor, head: Tensor) -> Loss:
    """A Llama of one small layer, with this head."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from fabric_llm.model.chunked_loss import Head, chunked_loss
    from fabric_llm.model.language_model import token_loss

    vocabulary, hidden_size = head.shape
    shape = {
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(hidden_size=hidden_size, vocab_size=vocabulary, **shape)
    with torch.device("meta"):  # only the head is used
        model = AutoModelForCausalLM.from_config(config, dtype=head.dtype)
        ours = Head(model)
        # it learns the class of the outputs
        ours.hidden_states(input_ids=torch.zeros(1, 2, dtype=torch.long))
    model.lm_head.weight = head
    return lambda hidden, head, targets: chunked_loss(ours, token_loss, hidden, targets)


def of_torch(hidden: Tensor, head: Tensor) -> Loss:
    from torch.nn.functional import linear_cross_entropy

    return lambda hidden, head, targets: linear_cross_entropy(
        hidden, head, targets, reduction="sum"
    )


LOSSES = {"full": full, "chunked": chunked, "torch": of_torch}


if __name__ == "__main__":
    sys.exit(main())
