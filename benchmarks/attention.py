#!/usr/bin/env python
"""Attention over packed documents, unmasked, masked and packed: time, memory, largest tensor, error.

    python benchmarks/attention.py --output attention.json

`unmasked` lets documents see each other (--document_masking false), `masked` is SDPA with the mask of context x
context that transformers makes (--attention sdpa), `packed` is this template's (--attention packed). Rows hold
documents of 300 tokens on average. Each way is a process of its own, and the ways take turns (turns.py).

First one decoder layer's attention alone, forward and backward, called with what the model calls it with; the mask
is made once for all layers, outside of what is timed. Its error is relative, in the L2 norm, against the same layer
in float64 (unmasked: without masks there as well). Then a whole training step (one_step.py). The largest tensor is
the largest that any operation returns.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, turns  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

WAYS = {  # flags of train.py
    "unmasked": ("--attention", "sdpa", "--document_masking", "false"),
    "masked": ("--attention", "sdpa", "--document_masking", "true"),
    "packed": ("--attention", "packed", "--document_masking", "true"),
}
SHAPES = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
    "cuda": {  # four layers of Llama 3.2 1B
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
}
TOY_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCABULARY, CONTEXTS = 8192, [1024, 4096]
TOKENS = {"cpu": 4096, "cuda": 16384}  # of a micro-batch
TOY_VOCABULARY, TOY_TOKENS, TOY_CONTEXTS, TOY_DOCUMENT_TOKENS = 128, 64, [32], 8
PARTS = {"layer": "One layer's attention", "step": "A training step"}
TITLES = ["", "ms", "quartiles", "times as fast as masked", "additional peak, MiB", "largest tensor, MiB"]
ERRORS = ["error of output", "of gradient"]  # of one layer


def main(argv: Optional[list[str]] = None) -> int:
    parser = turns.parser(__doc__.splitlines()[0])
    parser.add_argument("--contexts", nargs="+", type=int, help=f"tokens of a row (default: {CONTEXTS})")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure")
    options = turns.resolve(parser, argv)
    shape, vocabulary = (TOY_SHAPE, TOY_VOCABULARY) if options.smoke else (SHAPES[options.kind], VOCABULARY)
    tokens, document_tokens = (
        (TOY_TOKENS, TOY_DOCUMENT_TOKENS) if options.smoke else (TOKENS[options.kind], inputs.DOCUMENT_TOKENS)
    )
    rows: list[turns.Row] = []
    tables = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_llama(folder / "llama", vocab_size=vocabulary, **shape)
        for context in options.contexts or (TOY_CONTEXTS if options.smoke else CONTEXTS):
            data = f"data-{context}"
            inputs.write_rows(folder / data, vocabulary, context, max(16, tokens // context), document_tokens)
            for part, dtype in itertools.product(options.parts, options.dtypes):
                row = {"part": part, "context": context, "dtype": dtype}
                flags = inputs.flags(folder, "llama", data, options.kind, turns.DTYPES[dtype])
                flags += ["--micro_batch_size", str(tokens // context), "--compile", "false"]
                contenders = [
                    turns.Contender(options, {"name": way, **row}, CONTENDERS[part], [*flags, *WAYS[way]], way)
                    for way in WAYS
                ]
                found = turns.in_turns(contenders, options)
                tables.append(f"{PARTS[part]}, context {context}, {dtype}\n\n{table(found, part)}")
                rows += found
    notes = [f"Model: Llama {shape}, vocabulary {vocabulary}; {tokens} tokens a step, {document_tokens} a document"]
    print(turns.page("attention.py", "Attention over packed documents", notes, options, "\n\n".join(tables)))
    turns.write("attention.py", options, rows)
    return 0


def table(rows: list[turns.Row], part: str) -> str:
    masked, lines = next(row for row in rows if row["name"] == "masked"), []
    titles = TITLES + (ERRORS if part == "layer" else [])
    for row in rows:
        if (seconds := turns.median(row)) is None:
            lines.append(turns.failed(row["name"], row, titles))
            continue
        row["times_masked"] = turns.times_faster(row, masked)
        cells = [turns.milliseconds(seconds), turns.spread(row), turns.number(row["times_masked"])]
        cells += [turns.mebibytes(row["additional_bytes"]), turns.mebibytes(row["largest_bytes"])]
        cells += [f"{row[key]:.1e}" for key in ("output_error", "gradient_error") if part == "layer"]
        lines.append([row["name"], *cells])
    return turns.table(titles, lines)


# ------------------------------------------------------------------- the contenders


def training_step(turns: Any, flags: list[str], way: str) -> None:
    from benchmarks import one_step

    trainer = one_step.set_up(flags)
    batches, loss = batches_of(trainer), None
    with Largest() as largest:  # with the state that a first step makes
        one_step.take_step(trainer, 0, batches.at(0))
    turns.said = {"largest_bytes": largest.bytes}
    for step in itertools.count(1):
        if not turns.go_on(loss):
            return
        loss = one_step.take_step(trainer, step, batches.at(step * batches.global_batch_size))


def layer(turns: Any, flags: list[str], way: str) -> None:
    from benchmarks import one_step

    trainer = one_step.set_up(flags)
    attention, given = first_attention(trainer)
    said = errors(attention, given)
    with Largest() as largest:
        forward_and_backward(attention, given)
    turns.said = {**said, "largest_bytes": largest.bytes}
    while turns.go_on():
        forward_and_backward(attention, given)
        attention.zero_grad()
        given["hidden_states"].grad = None


CONTENDERS = {"layer": layer, "step": training_step}


def batches_of(trainer: Any) -> Any:
    from fabric_llm.data.batches import Batches

    plan = trainer.plan
    return Batches(plan.dataset.train, 1, plan.micro_batch_size, 1, document_end=plan.document_end)


def first_attention(trainer: Any) -> tuple[Any, dict[str, Any]]:
    """(the first layer's attention, the arguments that the model calls it with)"""
    import torch

    causal_lm = trainer.model.module.causal_lm
    attention, calls = causal_lm.model.layers[0].self_attn, []
    handle = attention.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    batch = {name: value for name, value in batches_of(trainer).at(0)[0].items() if name != "labels"}
    with torch.no_grad():
        trainer.model(**trainer.fabric.to_device(batch))
    handle.remove()
    [(args, given)] = calls
    assert not args, "transformers passes all of them by name"
    return attention, {**given, "hidden_states": given["hidden_states"].detach().requires_grad_()}


def forward_and_backward(attention: Any, given: dict[str, Any]) -> Tensor:
    output = attention(**given)[0]
    output.backward(output.detach())
    return output.detach()


def errors(attention: Any, given: dict[str, Any]) -> dict[str, float]:
    """Of the output and of the gradient of the input against float64, which gets a mask in place of documents' ends."""
    output = forward_and_backward(attention, given)
    gradient, given["hidden_states"].grad = given["hidden_states"].grad, None
    attention.zero_grad()
    exact, of_exact = in_float64(attention, given)
    expected = forward_and_backward(exact, of_exact)
    of_gradient = gradient.double() - of_exact["hidden_states"].grad
    return {
        "output_error": ((output.double() - expected).norm() / expected.norm()).item(),
        "gradient_error": (of_gradient.norm() / of_exact["hidden_states"].grad.norm()).item(),
    }


def in_float64(attention: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the layer with SDPA, its arguments) in float64, with a mask made here from where the documents end."""
    import copy

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


class Largest:
    """The largest tensor that any operation in the body returns."""

    def __enter__(self) -> Largest:
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        largest = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                results = function(*args, **(kwargs or {}))
                for result in tree_leaves(results):
                    if hasattr(result, "untyped_storage"):
                        largest.bytes = max(largest.bytes, result.numel() * result.element_size())
                return results

        self.bytes, self.mode = 0, Mode()
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


if __name__ == "__main__":
    sys.exit(main())
