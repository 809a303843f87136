"""The loss head and attention over packed documents, each way to compute them: time, memory and error.

    python benchmarks/fast_paths.py --output fast_paths.json
    python benchmarks/fast_paths.py --only loss

Loss: from hidden states to the sum of the losses of all tokens, and the gradients of hidden states and head. `full`
makes the logits of all tokens, as transformers does. `chunked` is this template's (fabric_llm/model/fast_paths.py). `torch`
is torch.nn.functional.linear_cross_entropy, from torch 2.13. `liger` and `cce` (cut_cross_entropy) are GPU kernels, where
their packages are installed.

Attention: of one decoder layer alone, forward and backward, called with what the model calls it with. `unmasked` lets
documents see each other (--document_masking false), `masked` is SDPA with the mask of context x context that transformers
makes (--attention sdpa), `packed` is this template's (--attention packed). The mask is made once for all layers, outside of
what is timed. Then a whole training step (one_step.py) with each.

Errors are relative, in the L2 norm, against float64 on the same inputs (unmasked: without masks there as well).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, page, turns  # noqa: E402
from benchmarks.turns import NotHere  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [tokens, size], head [vocabulary, size], targets -> sum

HEADS = {  # tokens x hidden size x vocabulary
    "smoke": ["64x32x128"],
    "cpu": ["2048x512x8192", "1024x576x49152"],
    "cuda": ["2048x512x8192", "1024x576x49152", "8192x4096x128256"],
}
EXACT_TOKENS = 256  # at once, in float64
MASKINGS = {  # flags of train.py
    "unmasked": {"attention": "sdpa", "document_masking": "false"},
    "masked": {"attention": "sdpa", "document_masking": "true"},
    "packed": {"attention": "packed", "document_masking": "true"},
}
SHAPES = {
    "smoke": inputs.TOY_LLAMA,
    "cpu": inputs.LLAMA,
    "cuda": {  # four layers of Llama 3.2 1B
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
}
VOCABULARY = {"smoke": 128, "cpu": 8192, "cuda": 8192}
TOKENS = {"smoke": 64, "cpu": 4096, "cuda": 16384}  # of a micro-batch
CONTEXTS = {"smoke": [32], "cpu": [1024, 4096], "cuda": [1024, 4096]}
DOCUMENT_TOKENS = {"smoke": 8, "cpu": inputs.DOCUMENT_TOKENS, "cuda": inputs.DOCUMENT_TOKENS}
COLUMNS = {
    **{"ms": page.step, "quartiles": page.spread, "times as fast": page.number("times")},
    "additional peak, MiB": page.mebibytes("additional_bytes"),
}
LOSS_COLUMNS = {
    **COLUMNS,
    "error of loss": page.number("loss_error", ".1e"),
    "of hidden states'": page.number("hidden_error", ".1e"),
    "of head's gradient": page.number("head_error", ".1e"),
}
LAYER_COLUMNS = {
    **COLUMNS,
    "error of output": page.number("output_error", ".1e"),
    "of gradient": page.number("gradient_error", ".1e"),
}
Compared = tuple[list[page.Row], str]  # the rows of a table, and the table with its title


def main(argv: Optional[list[str]] = None) -> int:
    parser = turns.parser(__doc__)
    parser.add_argument("--only", choices=PIECES, help="what to measure (default: both)")
    options = turns.resolve(parser, argv)
    size = "smoke" if options.smoke else options.kind
    pieces = [options.only] if options.only else list(PIECES)
    compared = [one for piece in pieces for one in PIECES[piece](size, options)]
    notes = [
        "Loss head: tokens x hidden size x vocabulary; additional peak: above hidden states, head and targets, so with both "
        "gradients; errors: of the loss, of the gradient of the hidden states, and of that of the head, against float64",
        f"Attention: Llama {SHAPES[size]}, vocabulary {VOCABULARY[size]}; {TOKENS[size]} tokens a step, "
        f"{DOCUMENT_TOKENS[size]} a document",
    ]
    body = "\n\n".join(table for _, table in compared)
    rows = [row for rows, _ in compared for row in rows]
    page.write("fast_paths.py", "The loss head and attention", notes, options, body, rows)
    return 0


def compare_losses(size: str, options: argparse.Namespace) -> Iterator[Compared]:
    for head, dtype in itertools.product(HEADS[size], options.dtypes):
        known, given = {"size": head, "dtype": dtype}, (tuple(map(int, head.split("x"))), dtype, options.kind)
        contenders = [turns.Contender(options, {"name": way, **known}, loss_step, way, *given) for way in LOSSES]
        rows = turns.in_turns(contenders, options)
        yield rows, f"Loss head, {head} in {dtype}, beside full\n\n{page.compare(rows, LOSS_COLUMNS, beside='full')}"


def compare_attention(size: str, options: argparse.Namespace) -> Iterator[Compared]:
    parts = {"layer": ("One layer's attention", layer, LAYER_COLUMNS)}
    parts["step"] = ("A training step", turns.training, COLUMNS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_llama(folder / "llama", vocab_size=VOCABULARY[size], **SHAPES[size])
        for context, part, dtype in itertools.product(CONTEXTS[size], parts, options.dtypes):
            data, sequences = f"data-{context}-{part}-{dtype}", TOKENS[size] // context
            inputs.write_rows(folder / data, VOCABULARY[size], context, max(16, sequences), DOCUMENT_TOKENS[size])
            title, function, columns = parts[part]
            contenders = []
            for way, masking in MASKINGS.items():
                known = {"name": way, "part": part, "context": context, "dtype": dtype}
                more = {"micro_batch_size": sequences, "compile": "false", **masking}
                flags = inputs.training(folder, "llama", data, options.kind, turns.DTYPES[dtype], **more)
                contenders.append(turns.Contender(options, known, function, flags))
            rows = turns.in_turns(contenders, options)
            table = page.compare(rows, columns, beside="masked")
            yield rows, f"{title}, context {context}, {dtype}, beside masked\n\n{table}"


PIECES = {"loss": compare_losses, "attention": compare_attention}


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def loss_step(turns: Any, way: str, size: tuple[int, int, int], dtype: str, kind: str) -> None:
    import torch

    tokens, hidden_size, vocabulary = size
    generator = torch.Generator(kind).manual_seed(0)
    given = {"generator": generator, "device": kind}
    hidden = torch.randn(tokens, hidden_size, **given).to(getattr(torch, dtype)).requires_grad_()
    head = torch.nn.Parameter((torch.randn(vocabulary, hidden_size, **given) * hidden_size**-0.5).to(hidden.dtype))
    targets = torch.randint(vocabulary, (tokens,), **given)
    loss_of = LOSSES[way](hidden, head)
    turns.said = loss_errors(loss_of, hidden, head, targets)
    loss = None
    while turns.go_on(loss):
        loss = loss_of(hidden, head, targets)
        loss.backward()
        loss = loss.detach()
        hidden.grad = head.grad = None


def loss_errors(loss_of: Loss, hidden: Tensor, head: Tensor, targets: Tensor) -> dict[str, float]:
    """Of the loss and its gradients against float64, as parts of their norms."""
    loss = loss_of(hidden, head, targets)
    loss.backward()
    pairs = zip((loss.detach(), hidden.grad, head.grad), loss_in_float64(hidden, head, targets))
    found = [relative_error(ours, exact) for ours, exact in pairs]
    hidden.grad = head.grad = None
    return dict(zip(("loss_error", "hidden_error", "head_error"), found))


def loss_in_float64(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def full(hidden: Tensor, head: Tensor) -> Loss:
    from fabric_llm.model.language_model import token_loss

    return lambda hidden, head, targets: token_loss(hidden @ head.T, targets)


def chunked(hidden: Tensor, head: Tensor) -> Loss:
    """A Llama of one small layer, with this head."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from fabric_llm.model.fast_paths import Head, chunked_loss
    from fabric_llm.model.language_model import token_loss

    vocabulary, hidden_size = head.shape
    shape = {"num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 1, "tie_word_embeddings": False}
    config = LlamaConfig(hidden_size=hidden_size, vocab_size=vocabulary, **shape)
    with torch.device("meta"):  # only the head is used
        model = AutoModelForCausalLM.from_config(config, dtype=head.dtype)
        ours = Head(model)
        ours.hidden_states(input_ids=torch.zeros(1, 2, dtype=torch.long))  # it learns the class of the outputs
    model.lm_head.weight = head
    return lambda hidden, head, targets: chunked_loss(ours, token_loss, hidden, targets)


def of_torch(hidden: Tensor, head: Tensor) -> Loss:
    import torch

    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise NotHere("torch has it from 2.13 on")
    return lambda hidden, head, targets: function(hidden, head, targets, reduction="sum")


def liger(hidden: Tensor, head: Tensor) -> Loss:
    require_gpu(hidden)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda hidden, head, targets: function(head, hidden, targets)


def cce(hidden: Tensor, head: Tensor) -> Loss:
    require_gpu(hidden)
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, head, targets: linear_cross_entropy(hidden, head, targets, reduction="sum")


def require_gpu(hidden: Tensor) -> None:
    if not hidden.is_cuda:
        raise NotHere("needs a GPU")


LOSSES = {"full": full, "chunked": chunked, "torch": of_torch, "liger": liger, "cce": cce}


def layer(turns: Any, flags: list[str]) -> None:
    from benchmarks import one_step

    attention, given = first_attention(one_step.set_up(flags))
    turns.said = attention_errors(attention, given)
    while turns.go_on():
        forward_and_backward(attention, given)
        attention.zero_grad()
        given["hidden_states"].grad = None


def first_attention(run: Any) -> tuple[Any, dict[str, Any]]:
    """(the first layer's attention, the arguments that the model calls it with)"""
    import torch

    batch = run.batches.at(0)[0]
    attention, calls = run.model.module.causal_lm.model.layers[0].self_attn, []
    handle = attention.register_forward_pre_hook(lambda module, args, given: calls.append(given), with_kwargs=True)
    with torch.no_grad():
        run.model(**run.fabric.to_device({name: batch[name] for name in batch if name != "labels"}))
    handle.remove()
    [given] = calls  # transformers passes all of them by name
    return attention, {**given, "hidden_states": given["hidden_states"].detach().requires_grad_()}


def forward_and_backward(attention: Any, given: dict[str, Any]) -> Tensor:
    output = attention(**given)[0]
    output.backward(output.detach())
    return output.detach()


def attention_errors(attention: Any, given: dict[str, Any]) -> dict[str, float]:
    """Of the output and of the gradient of the input against float64, which gets a mask in place of documents' ends."""
    output = forward_and_backward(attention, given)
    gradient, given["hidden_states"].grad = given["hidden_states"].grad, None
    attention.zero_grad()
    exact, of_exact = attention_in_float64(attention, given)
    expected = forward_and_backward(exact, of_exact)
    return {
        "output_error": relative_error(output, expected),
        "gradient_error": relative_error(gradient, of_exact["hidden_states"].grad),
    }


def attention_in_float64(attention: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the layer with SDPA, its arguments) in float64, with a mask made here from where the documents end."""
    import torch

    exact = copy.deepcopy(attention).double()
    exact.config = copy.deepcopy(attention.config)
    exact.config._attn_implementation = "sdpa"
    hidden = given["hidden_states"].detach().double().requires_grad_()
    rows, context, _ = hidden.shape
    documents = torch.zeros(rows * context, dtype=torch.long, device=hidden.device)
    ends = given.get("cu_seq_lens_q")
    if ends is not None:
        documents[ends[1:-1].long()] = 1
    elif given.get("attention_mask") is not None:  # a document begins where a token doesn't see the one before it
        documents.view(rows, context)[:, 1:] = ~given["attention_mask"][:, 0].diagonal(-1, 1, 2)
    documents = documents.cumsum(0).view(rows, context)
    mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    embeddings = tuple(tensor.double() for tensor in given["position_embeddings"])
    return exact, {"hidden_states": hidden, "position_embeddings": embeddings, "attention_mask": mask}


if __name__ == "__main__":
    sys.exit(main())
