"""What a model can take: packed documents, a loss without logits, rows of several lengths. Rank 0
measures it on the reference (see reference.py), before anything is built.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Optional
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from fabric_llm.model import chunked_loss, packed_attention, positions
from fabric_llm.model.attention import takes_documents, takes_positions
from fabric_llm.model.flops import of_layers, windows
from fabric_llm.model.gate import LIMITS, Inputs
from fabric_llm.model.language_model import LanguageModel

# The mean difference of logits that rounding explains on one device, as a fraction of their
# standard deviation. It is 25 to 1000 times what was seen over 70 families
# (docs/results/families.md), and a fifth of what is seen where packed attention changes a model.
SAME_DEVICE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def idle_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Names of parameters that train, but on which the loss of a few tokens doesn't depend.

    Such as a vision tower, a router's bias that something else corrects, or experts that get none
    of these tokens. Autograd's graph says so; no gradient is made.
    """
    rows = _rows(model)
    # Eager attention has gradients on a CPU, unlike flex attention.
    with attention(model, "eager"), torch.enable_grad():
        loss = LanguageModel(model.eval())(rows, rows)
    # Walk autograd's graph from the loss back to the parameters that it was computed from.
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    reached = {id(node.variable) for node in seen if hasattr(node, "variable")}
    trained = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
    return frozenset(name for name, parameter in trained if id(parameter) not in reached)


def chunks_its_loss(reference: PreTrainedModel, precision: str) -> bool:
    """Whether the model's own code, given its hidden states alone, makes the logits that the whole
    model makes."""

    def chunked(rows: Tensor) -> Tensor:
        # A model without a head of its own raises ValueError here, which counts as "can't".
        head = chunked_loss.Head(reference)
        return torch.stack([head(row) for row in head.hidden_states(input_ids=rows)[0]])

    # Gradients in float16 need their scale from the start.
    return precision != "16-mixed" and _makes_the_same(reference, chunked)


def plain_attention(reference: PreTrainedModel) -> str:
    """The attention of plain transformers whose gradients the model must have: eager, where that is
    the same function as the one that transformers takes by default.

    Falcon with ALiBi adds its positions twice in eager attention (transformers 5.24), so what is
    trained with it would open as another model: it raises ValueError. Elsewhere a difference may
    also be the rounding of a deep model, or routers that choose other experts by it.
    """
    default = reference.get_correct_attn_implementation(None, is_init_check=True)
    asked = reference.config._attn_implementation
    has_alibi = getattr(reference.config, "alibi", False)
    if has_alibi and asked in ("eager", "sdpa") and asked != default:
        raise ValueError(
            f"--attention {asked}: {type(reference).__name__} computes another function with it "
            f"than with {default}, which transformers takes by default, so what is trained would "
            f"open as another model; take --attention {default}."
        )

    def eager(rows: Tensor) -> Tensor:
        with attention(reference, "eager"):
            return LanguageModel(reference)(rows)

    with attention(reference, default):
        is_same = default == "eager" or _makes_the_same(reference, eager)
    return "eager" if is_same else default


def takes_packed_attention(reference: PreTrainedModel) -> bool:
    """Whether the model's layers make the same of packed documents with packed attention as with
    SDPA's mask."""
    if not (takes_documents(type(reference)) and takes_positions(type(reference))):
        return False
    seen = set()

    def watched(*args: Any, **more: Any) -> tuple[Tensor, None]:
        # The windows that layers hand to the attention, None for full attention.
        seen.add(more.get("sliding_window") or None)
        return packed_attention.packed_attention(*args, **more)

    def packed(rows: Tensor, **positions: Tensor) -> Tensor:
        with (
            attention(reference, packed_attention.PACKED),
            patch.dict(AttentionInterface._global_mapping, {packed_attention.PACKED: watched}),
        ):
            return LanguageModel(reference)(rows, **positions)

    # Positions that restart every 7 tokens: three documents in each row.
    is_same = _makes_the_same(reference, packed, position_ids=torch.arange(16).expand(2, -1) % 7)
    # Masks are made of the windows that the configuration has, and packed attention of those that
    # layers hand over: both must be the same.
    # Some models have their windows in masks alone, which these few tokens don't show.
    text_config = reference.config.get_text_config()
    has_window = any(getattr(one, "sliding_window", None) for one in of_layers(text_config))
    return is_same and seen == set(windows(text_config)) and has_window <= any(seen)


def heads_in_training(reference: PreTrainedModel) -> tuple[int, float]:
    """The largest (size of a head, dropout) that the attention of the model has in training."""
    sizes, dropouts = [0], [0.0]

    def watched(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Any:
        # Heads of keys and values may have another size than those of queries.
        sizes.extend([query.shape[-1], value.shape[-1]])
        dropouts.append(more.get("dropout") or 0.0)
        return packed_attention.packed_attention(module, query, key, value, *args, **more)

    # Layers hand their heads and their dropout to the attention function, so one that listens takes
    # its place in the body.
    watching = patch.dict(AttentionInterface._global_mapping, {packed_attention.PACKED: watched})
    with (
        attention(reference, packed_attention.PACKED),
        watching,
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        LanguageModel(reference.train())(_rows(reference))
    reference.eval()
    return max(sizes), max(dropouts)


def _makes_the_same(
    reference: PreTrainedModel, fast: Callable[..., Tensor], **given: Tensor
) -> bool:
    """Whether the logits of a fast path are those of the plain one but for rounding; False for
    NaN."""
    reference.eval()
    rows = _rows(reference)
    try:
        with torch.no_grad():
            expected = LanguageModel(reference)(rows, **given).float()
            logits = fast(rows, **given).float()
    except (
        TypeError,
        AttributeError,
        RuntimeError,
        LookupError,
        ValueError,
    ):  # a model of another build
        return False
    difference = (logits - expected).abs().mean() / expected.std()
    return difference.item() <= SAME_DEVICE[reference.dtype]


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention implementation of transformers in the body."""
    # By id: modules share configurations, and parts of a model may have their own.
    configs = {
        id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None
    }.values()
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, former in zip(configs, before):
            config._attn_implementation = former


def find_leak(model: PreTrainedModel) -> Optional[float]:
    """None if restarting positions alone make a packed document blind to the one before it, on the
    path that trains.

    Else the largest change of its logits, as a fraction of their standard deviation, when the one
    before it is another. Autograd says exactly whether there is a way: where attention is masked
    the gradient is zero, not small, whatever rounding does, and one that is left, through a
    recurrent state or a convolution, isn't. What it can't see, positions that go on where they
    should restart, makes a document's logits differ from those that it has alone by more than
    rounding.
    """
    rows, places = _rows(model), torch.arange(16)[None]
    begins = torch.tensor([8, 5])  # of the second document in each row
    in_second = places >= begins[:, None]
    given = {}
    if takes_positions(type(model)):
        given["position_ids"] = torch.where(in_second, places - begins[:, None], places)
    language_model = LanguageModel(model)
    leaks = _depends(language_model, rows, given, in_second, ~in_second)

    # The logits of the second documents: behind the first ones, behind others, and alone.
    vocabulary = model.config.get_text_config().vocab_size
    # Other tokens in the first document only.
    other_rows = torch.where(in_second, rows, (rows * 3 + 1) % vocabulary)
    model.eval()
    with torch.no_grad():
        packed = language_model(rows, **given)[in_second].float()
        behind_others = language_model(other_rows, **given)[in_second].float()
        documents = []
        for row, begin in enumerate(begins.tolist()):
            place = slice(row, row + 1), slice(begin, None)
            own = {name: value[place] for name, value in given.items()}
            documents.append(language_model(rows[place], **own)[0])
    alone = torch.cat(documents).float()

    deviation = alone.std()
    precision = "32-true" if model.dtype == torch.float32 else "bf16-true"
    for logits in (packed, behind_others):
        difference = (logits - alone).abs().mean() / deviation
        if not difference <= LIMITS[precision].logits:  # NaN as well
            leaks = True
    if not leaks:
        return None
    differences = torch.stack([packed - behind_others, packed - alone])
    return (differences.abs().max() / deviation).item()


def beyond_the_row(
    model: PreTrainedModel, lengths: Sequence[int], documents: bool = False
) -> Optional[str]:
    """What the positions in a row depend on besides their place in it, in words; None where they
    depend on nothing else. lengths: those that rows have, in tokens.

    The probe is a few positions, however long rows are. documents: rows hold documents of any
    length up to theirs, whose positions restart. model: it has computed nothing yet.
    """
    config = model.config.get_text_config()
    layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
    chunk = getattr(config, "attention_chunk_size", None)
    if documents and "chunked_attention" in layer_types and chunk and max(lengths) > chunk:
        return f"its attention counts chunks of {chunk:,} tokens from the beginning of a row"
    if not (kinds := positions.kinds(config) & positions.BY_LONGEST):
        return None
    # Documents may be shorter than any row: as short as can be, or just missing a row's length.
    if documents:
        lengths = sorted({2, *lengths, *(length - 1 for length in lengths)})
    # transformers keeps the longest row that was seen on the module of rotary positions.
    for rotary in (module for module in model.modules() if hasattr(module, "rope_type")):
        per_type = "layer_type" in inspect.signature(rotary.forward).parameters
        for given in [{"layer_type": one} for one in layer_types] if per_type else [{}]:
            if _depends_on_longest(rotary, lengths, documents, given):
                return f"its rotary positions ({min(kinds)}) depend on the longest one that it sees"
    return None


def _depends_on_longest(
    rotary: nn.Module, lengths: Sequence[int], together: bool, given: dict[str, str]
) -> bool:
    """Whether the positions of a row depend on rows that the module has seen before it, or,
    `together`, in the same batch."""

    def ends(module: nn.Module, *ends: int) -> Tensor:
        """Cosines and sines of the first and the last position of each row."""
        places = torch.tensor([[0, end - 1] for end in ends])
        return torch.stack(module(torch.zeros(1), places, **given))

    # Copies, because the module remembers what it has computed.
    for one in lengths:
        alone = ends(deepcopy(rotary), one)
        for other in lengths:
            used = deepcopy(rotary)
            beside = ends(used, other, one)[:, 1:]
            if (
                together
                and not torch.equal(beside, alone)
                or not torch.equal(ends(used, one), alone)
            ):
                return True
    return False


def sees_ahead(model: PreTrainedModel) -> bool:
    """True if what the model says at a position depends on tokens after it: then its loss means
    nothing."""
    # The logits of the first eight tokens, and the embeddings of those after them.
    early = torch.arange(16)[None] < 8
    return _depends(LanguageModel(model), _rows(model)[:1], {}, early, ~early)


def _depends(
    model: LanguageModel, rows: Tensor, given: Inputs, here: Tensor, there: Tensor
) -> bool:
    """True if logits at the places `here` depend on embeddings at the places `there`, in training,
    dropout and all."""
    # Flex attention has no backward pass on CPUs.
    if model.causal_lm.config._attn_implementation == "flex_attention":
        return False
    embedded: list[Tensor] = []

    def cut(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models write into it

    handle = model.causal_lm.get_input_embeddings().register_forward_hook(cut)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        logits = model.train()(rows, **given)[here].float()
        # A plain sum could be blind to changes that cancel out.
        weights = torch.arange(logits.numel()).view_as(logits).cos()
        gradients = torch.autograd.grad((logits * weights).sum(), embedded, allow_unused=True)
    handle.remove()
    return any(
        gradient is not None and bool((gradient[there] != 0).any()) for gradient in gradients
    )


def _rows(model: PreTrainedModel) -> Tensor:
    """Two rows of 16 tokens."""
    return (
        torch.stack([torch.arange(16) * 7 + 3, torch.arange(16) * 5 + 2])
        % model.config.get_text_config().vocab_size
    )
