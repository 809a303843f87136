"""Attention over packed documents, unmasked, masked and packed: time, memory, largest tensor, error.

    python benchmarks/attention.py --output attention.json

`unmasked` lets documents see each other (--document_masking false), `masked` is SDPA with the mask of context x
context that transformers makes (--attention sdpa), `packed` is this template's (--attention packed). Rows hold
documents of 300 tokens on average.

First one decoder layer's attention alone, forward and backward, called with what the model calls it with; the mask
is made once for all layers, outside of what is timed. Its error is relative, in the L2 norm, against the same layer
in float64 (unmasked: without masks there as well). Then a whole training step (one_step.py). The largest tensor is
the largest that any operation returns.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, page, turns  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

WAYS = {  # flags of train.py
    "unmasked": {"attention": "sdpa", "document_masking": "false"},
    "masked": {"attention": "sdpa", "document_masking": "true"},
    "packed": {"attention": "packed", "document_masking": "true"},
}
SHAPES = {
    "smoke": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "cpu": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
    "cuda": {  # four layers of Llama 3.2 1B
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
}
VOCABULARY = {"smoke": 128, "cpu": 8192, "cuda": 8192}
TOKENS = {"smoke": 64, "cpu": 4096, "cuda": 16384}  # of a micro-batch
CONTEXTS = {"smoke": [32], "cpu": [1024, 4096], "cuda": [1024, 4096]}
DOCUMENT_TOKENS = {"smoke": 8, "cpu": inputs.DOCUMENT_TOKENS, "cuda": inputs.DOCUMENT_TOKENS}
PARTS = {"layer": "One layer's attention", "step": "A training step"}
COLUMNS = {
    **{"ms": page.step, "quartiles": page.spread, "times as fast as masked": page.number("times")},
    "additional peak, MiB": page.mebibytes("additional_bytes"),
    "largest tensor, MiB": page.mebibytes("largest_bytes"),
}
ERRORS = {"error of output": page.number("output_error", ".1e"), "of gradient": page.number("gradient_error", ".1e")}


def main(argv: Optional[list[str]] = None) -> int:
    options = turns.resolve(turns.parser(__doc__), argv)
    size = "smoke" if options.smoke else options.kind
    vocabulary, tokens, document_tokens = VOCABULARY[size], TOKENS[size], DOCUMENT_TOKENS[size]
    rows: list[page.Row] = []
    tables = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_llama(folder / "llama", vocab_size=vocabulary, **SHAPES[size])
        for context in CONTEXTS[size]:
            data = f"data-{context}"
            inputs.write_rows(folder / data, vocabulary, context, max(16, tokens // context), document_tokens)
            for part, dtype in itertools.product(PARTS, options.dtypes):
                known = {"part": part, "context": context, "dtype": dtype}
                more = {"micro_batch_size": tokens // context, "compile": "false"}
                contenders = []
                for name, way in WAYS.items():
                    given = folder, "llama", data, options.kind, turns.DTYPES[dtype]
                    flags = inputs.training(*given, **more, **way)
                    contenders.append(turns.Contender(options, {"name": name, **known}, CONTENDERS[part], flags))
                found = turns.in_turns(contenders, options)
                table = page.compare(found, COLUMNS | (ERRORS if part == "layer" else {}), beside="masked")
                tables.append(f"{PARTS[part]}, context {context}, {dtype}\n\n{table}")
                rows += found
    model = f"Llama {SHAPES[size]}, vocabulary {vocabulary}"
    notes = [f"Model: {model}; {tokens} tokens a step, {document_tokens} a document"]
    page.write("attention.py", "Attention over packed documents", notes, options, "\n\n".join(tables), rows)
    return 0


def training_step(turns: Any, flags: list[str]) -> None:
    from benchmarks import one_step

    trainer = one_step.set_up(flags)
    with one_step.Largest() as largest:  # with the state that a first step makes
        one_step.take_step(trainer, 0, one_step.batches_of(trainer).at(0))
    turns.said = {"largest_bytes": largest.bytes}
    one_step.train(turns, trainer, first=1)


def layer(turns: Any, flags: list[str]) -> None:
    from benchmarks import one_step

    trainer = one_step.set_up(flags)
    attention, given = first_attention(trainer, one_step.batches_of(trainer).at(0)[0])
    said = errors(attention, given)
    with one_step.Largest() as largest:
        forward_and_backward(attention, given)
    turns.said = {**said, "largest_bytes": largest.bytes}
    while turns.go_on():
        forward_and_backward(attention, given)
        attention.zero_grad()
        given["hidden_states"].grad = None


CONTENDERS = {"layer": layer, "step": training_step}


def first_attention(trainer: Any, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """(the first layer's attention, the arguments that the model calls it with)"""
    import torch

    causal_lm = trainer.model.module.causal_lm
    attention, calls = causal_lm.model.layers[0].self_attn, []
    handle = attention.register_forward_pre_hook(lambda module, args, given: calls.append(given), with_kwargs=True)
    with torch.no_grad():
        trainer.model(**trainer.fabric.to_device({name: batch[name] for name in batch if name != "labels"}))
    handle.remove()
    [given] = calls  # transformers passes all of them by name
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
