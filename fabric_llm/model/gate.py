"""Is it the model that transformers loads, does it train as that would, and which fast paths and
packed documents can it take?

Before anything is built, rank 0 measures what the reference (see reference.py) takes. Before step 1
they are compared: rank 0 runs the reference on a few tokens, then all ranks run the wrapped model
on them, twice. The first pass is eager, without gradients, and keeps what each leaf module makes,
so that a difference can be named. The second is the one that trains: fast paths, such as a loss
without logits, attention without a mask or compiled layers, must give the loss and the gradients of
plain transformers, eager attention and all logits. Of each module's output the last positions are
kept, of each parameter's gradient its norm and a sample, so that no second gradient takes up
memory.
"""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, Optional
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from fabric_llm.base import ranks
from fabric_llm.base.fabric import Fabric
from fabric_llm.data.batches import part_of
from fabric_llm.model import chunked_loss, loading, packed_attention, positions
from fabric_llm.model.flops import windows
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import takes_positions
from fabric_llm.model.sharded import PREFIX, local_part, original_name, reshard, shard_ranks, shards

PROBE_TOKENS = 64
KEPT_POSITIONS = 8  # of each module's output, the last ones
SAMPLED_ELEMENTS = 4096  # of each parameter's gradient, evenly spaced
SQUARED_AT_ONCE = 2**22  # elements of a gradient, of which float64 copies are made
# A layer with less than this fraction of the whole gradient's norm isn't compared: it may be
# nothing but rounding.
SMALL = 1e-3
Inputs = dict[str, Tensor]

# The mean difference of logits that rounding explains on one device, as a fraction of their
# standard deviation: 25 to 1000 times what was seen over 70 families (docs/results/families.md),
# and a fifth of what a model that packed attention would change shows.
SAME_DEVICE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


class Limits(NamedTuple):
    """Differences that rounding explains: two ranks of a CPU differ from one by 1e-6 in float32, a
    GPU in bfloat16 sums in another order and rounds after each of dozens of layers."""

    loss: float  # nats
    logits: float  # mean, as a fraction of their standard deviation
    module: float  # root mean square of a module's output, as a fraction of its own
    gradient_norm: float = math.inf  # of a layer, as a fraction of it
    gradient_cosine: float = math.inf  # 1 - cosine


# Float16 needs a scale of the loss, which is found in training: its gradients aren't compared.
LIMITS = {
    "32-true": Limits(1e-3, 5e-3, 1e-2, 2e-3, 2e-6),
    "bf16-true": Limits(5e-2, 1e-1, 1.5e-1, 0.15, 0.03),
    "bf16-mixed": Limits(5e-2, 1e-1, 1.5e-1, 0.15, 0.03),
    "16-mixed": Limits(1e-2, 5e-2, 5e-2),
    # With --float8 only gradients are compared by these, since all else is computed as without it.
    # Random models of 2 to 32 layers have 0.02 to 0.22 of the norm and cosines from 0.99 down to
    # 0.75 (docs/results/float8.md).
    "float8": Limits(0.15, 1e-1, 1.5e-1, 0.5, 0.4),
}


class Outputs(NamedTuple):
    """What a model makes of the probe."""

    loss: float  # nats per target
    logits: Tensor  # float32 [positions, vocabulary], the last KEPT_POSITIONS
    # By the leaf module's name its output at those positions, in the order of calls.
    modules: dict[str, Tensor]
    buffers: dict[str, Tensor]  # after the pass: FSDP casts them in its first


class Gradients(NamedTuple):
    """What is kept of the probe's gradients, by parameter."""

    loss: float  # nats per target
    squares: dict[str, float]  # sum of the gradient's squares
    samples: dict[str, Tensor]  # float32 [up to SAMPLED_ELEMENTS]


@torch.no_grad()
def outputs_of(model: nn.Module, input_ids: Tensor, forward: Callable[[Tensor], Tensor]) -> Outputs:
    """Run `forward(input_ids)`, which gives the logits of `model`, int64 [1, tokens] -> [1, tokens,
    vocabulary].

    Names are those in the unwrapped causal LM. The model is in evaluation afterwards.
    """
    modules: dict[str, Tensor] = {}
    names = {
        module: _path(name) for name, module in model.named_modules() if not any(module.children())
    }

    def last_positions(output: Tensor) -> Tensor:  # a copy: a view would keep all of them
        return output[-KEPT_POSITIONS:].to("cpu", torch.float32, copy=True)

    def keep(module: nn.Module, inputs: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output  # RoPE gives cosines and sines
        if isinstance(output, Tensor) and output.ndim == 3 and output.is_floating_point():
            modules[names[module]] = last_positions(output[0])

    # Dropout and the like would make two passes differ.
    model.eval()
    handles = [module.register_forward_hook(keep) for module in names]
    # Compiled layers would keep the hooks in their graphs.
    with torch.compiler.set_stance("force_eager"):
        logits = forward(input_ids)[0].float()
    for handle in handles:
        handle.remove()
    loss = F.cross_entropy(logits[:-1], input_ids[0, 1:].to(logits.device)).item()
    buffers = {_path(name): buffer.cpu().clone() for name, buffer in model.named_buffers()}
    return Outputs(loss, last_positions(logits), modules, buffers)


def _path(name: str) -> str:
    return original_name(name).removeprefix(PREFIX)


def output_difference(ours: Outputs, reference: Outputs, precision: str) -> Optional[str]:
    """None if only rounding differs, else a sentence that names the first module that does."""
    # Buffers hold no weights, so that no file can correct them: RoPE's frequencies must be exact.
    for name, expected in reference.buffers.items():
        own = ours.buffers.get(name)
        if own is None or own.dtype != expected.dtype or not torch.equal(own, expected):
            dtype = "missing" if own is None else own.dtype
            return (
                f"the buffer {name} isn't the one that transformers makes ({dtype}, there "
                f"{expected.dtype})."
            )
    limits, named = LIMITS[precision], "no module alone"
    logits = ((ours.logits - reference.logits).abs().mean() / reference.logits.std()).item()
    for name, expected in reference.modules.items():
        own = ours.modules.get(name)
        if own is not None and own.shape == expected.shape:
            square = (own - expected).square().mean()
            relative = (square / expected.square().mean().clamp(min=1e-12)).sqrt().item()
            if not relative <= limits.module:  # NaN as well
                named = f"{name} ({relative:.1%} of its output)"
                break
    else:
        if abs(ours.loss - reference.loss) <= limits.loss and logits <= limits.logits:
            return None
    return (
        f"the model on the devices isn't the one that transformers loads: loss {ours.loss:.4f} "
        f"instead of {reference.loss:.4f}, logits differ by {logits:.1%}; the first module that "
        f"differs: {named}."
    )


def gradients_of_reference(model: nn.Module, inputs: Inputs) -> Gradients:
    """Those of a LanguageModel that one process holds. Each gradient is dropped as soon as it is
    sampled."""
    names = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    squares: dict[str, float] = {}
    samples: dict[str, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        flat, name = parameter.grad.flatten(), names[parameter]
        squares[name], samples[name] = square(flat).item(), _sampled(flat, 0, flat.numel())
        parameter.grad = None

    # A hook samples each gradient as it is made: all at once would take a second model's memory.
    handles = [parameter.register_post_accumulate_grad_hook(keep) for parameter in names]
    with torch.enable_grad():
        loss = model.eval()(**inputs) / (inputs["labels"].numel() - len(inputs["labels"]))
        loss.backward()
    for handle in handles:
        handle.remove()
    return Gradients(loss.item(), squares, samples)


def gradients_of_wrapped(
    fabric: Fabric, wrapped: nn.Module, inputs: Inputs, place: dict[str, int]
) -> Gradients:
    """Those of the wrapped model, right on rank 0. All ranks call it with the same inputs. No
    gradient is left.

    place: see Placement.rows_of. Ranks that share rows each compute a part of the probe.
    """
    parts, targets = place["parts"], inputs["labels"].numel() - len(inputs["labels"])
    if parts > 1:
        inputs = part_of(inputs, place["part"], parts)
    with warnings.catch_warnings():
        # Without dropout a layer may return a view of its last product, which nobody writes into
        # here.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        # In evaluation, as the reference: dropout would differ.
        loss = wrapped.eval()(**fabric.to_device(inputs)) / targets
        fabric.backward(loss * parts)  # strategies average over all ranks
    reshard(wrapped)
    loss = loss.detach()
    if parts > 1:
        loss = ranks.sum_over_ranks(fabric, loss.clone()) / place["world_size"]
    sampled = {}
    for name, (parameter, first, counts) in shards(wrapped).items():
        if parameter.requires_grad:
            # Zeros where there is none.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            piece = local_part(gradient).detach().flatten()
            sampled[name] = square(piece).item(), _sampled(piece, first, sum(counts))
            parameter.grad = gradient = piece = None
    # Rank 0 puts together what the ranks of one replica have sampled of their shards.
    gathered = ranks.gather(sampled)
    held = [gathered[rank] for rank in shard_ranks(wrapped)]
    return Gradients(
        loss.item(),
        {name: sum(own[name][0] for own in held) for name in sampled},
        {name: torch.cat([own[name][1] for own in held]) for name in sampled},
    )


def gradient_difference(ours: Gradients, reference: Gradients, precision: str) -> Optional[str]:
    """None if only rounding differs, else words that name the layer that differs most."""
    limits = LIMITS[precision]
    # The loss is the cheapest to compare, and what differs in it differs everywhere.
    if not abs(ours.loss - reference.loss) <= limits.loss:
        return f"the loss is {ours.loss:.4f} instead of {reference.loss:.4f}"
    # By layer: causal_lm.model.layers.3.mlp.up_proj.weight belongs to model.layers.3.
    layers: dict[str, list[str]] = {}
    for name in ours.squares:
        if name in reference.squares:  # others have no part in the loss
            path = _path(name)
            # A parameter outside of numbered layers, such as an embedding, is its own module's.
            numbered = re.match(r"(.*?\.\d+)\.", path)
            layer = numbered[1] if numbered else path.rpartition(".")[0]
            layers.setdefault(layer, []).append(name)
    # Layers are judged by norm and direction, each as a multiple of what rounding explains.
    whole = sum(reference.squares.values())
    worst, words = 1.0, None
    for layer, names in layers.items():
        expected = sum(reference.squares[name] for name in names)
        if not expected > SMALL**2 * whole:
            continue
        norm = math.sqrt(sum(ours.squares[name] for name in names) / expected)
        own, other = (
            torch.cat([of.samples[name] for name in names]).double() for of in (ours, reference)
        )
        cosine = 1.0  # an embedding's sample may hold none of the probe's tokens
        if own.any() or other.any():
            cosine = (own @ other / (own.norm() * other.norm())).item()
        excess = max(abs(norm - 1) / limits.gradient_norm, (1 - cosine) / limits.gradient_cosine)
        excess = excess if math.isfinite(norm + cosine) else math.inf
        if excess > worst:
            worst = excess
            words = (
                f"the gradient of {layer} has {norm:.3f} times the norm, and a cosine of "
                f"{cosine:.4f}"
            )
    return words


def _sampled(gradient: Tensor, offset: int, count: int) -> Tensor:
    """The elements at every n-th place of a gradient with `count` elements. gradient: its flat part
    that begins at `offset`.

    A copy: a view would keep the whole gradient, which would be sent to all ranks with it.
    """
    step = max(1, -(-count // SAMPLED_ELEMENTS))
    return gradient[-offset % step :: step].to("cpu", torch.float32, copy=True)


def square(gradient: Tensor) -> Tensor:
    """The sum of its squares, float64 scalar, in parts: torch makes a float64 copy of what it is
    given."""
    parts = gradient.flatten().split(SQUARED_AT_ONCE)
    return torch.stack(
        [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]
    ).sum()


def idle_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Names of parameters that train, but on which the loss of a few tokens doesn't depend.

    Such as a vision tower, a router's bias that something else corrects, or experts that get none
    of these tokens. Autograd's graph says so; no gradient is made.
    """
    rows = _rows(model)
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
    if not (loading.takes_documents(type(reference)) and takes_positions(type(reference))):
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

    is_same = _makes_the_same(reference, packed, position_ids=torch.arange(16).expand(2, -1) % 7)
    # Some models have their windows in masks alone, which these few tokens don't show.
    text_config = reference.config.get_text_config()
    has_window = bool(getattr(text_config, "sliding_window", None))
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
    """What positions in a row of one of `lengths` tokens depend on besides their place, in words;
    None: on nothing.

    Its probe is a few positions, however long rows are. documents: rows hold documents of any
    length up to theirs, whose positions restart. model: it has computed nothing yet.
    """
    config = model.config.get_text_config()
    layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
    chunk = getattr(config, "attention_chunk_size", None)
    if documents and "chunked_attention" in layer_types and chunk and max(lengths) > chunk:
        return f"its attention counts chunks of {chunk:,} tokens from the beginning of a row"
    if not (kinds := positions.kinds(config) & positions.BY_LONGEST):
        return None
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
