"""A model with more tokens: its tokenizer extended, rows added, written as a Hugging Face directory, and proven there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fabric_llm.base import files
from fabric_llm.base.ending import on_disk
from fabric_llm.data import new_tokens
from fabric_llm.model import new_rows
from fabric_llm.model.loading import checked_skeleton, has_weights, load_config, load_reference, tokenizer_beside
from fabric_llm.plan.checks import exported_output
from fabric_llm.prepare.corpus import Corpus
from fabric_llm.verify.export import VerificationError, replacing, write_model

PROBE_TOKENS = 64
ROUNDING = (
    1e-5  # largest difference of float32 logits, as a part of their standard deviation, that another kernel explains
)


@dataclass(frozen=True)
class Extension:
    """What was added, and what was measured on the written directory."""

    tokens: int  # added
    vocabulary: tuple[int, int]  # tokens before and after
    rows: tuple[int, int]  # of the embedding
    parameters: int  # tensors, of which all old values keep their bits
    logits_difference: float  # the largest, as a part of the logits' standard deviation; 0: bit for bit
    held_out: Measured


class Measured(NamedTuple):
    """The two tokenizers on the held-out text."""

    texts: int
    bytes: int
    before: int  # tokens
    after: int
    new: int  # tokens of the new ones that occur
    with_unknown: int  # texts of which characters were <unk> before: their round trip was none


class Before(NamedTuple):
    """What is kept of the model as it was."""

    first: int  # id of the first new token
    rows: int
    probe: Tensor  # int64 [1, tokens]
    logits: Tensor  # float32 [tokens, first]
    digests: dict[str, str]  # of each parameter, of tables of tokens those of old ones


def extend(
    model_name: str,
    corpus: Corpus,
    output: Path,
    *,
    tokens: int,
    max_shard_size: str = "5GB",
    seed: int = 0,
    overwrite: bool = False,
) -> Extension:
    """Write `output`, the model with at most `tokens` more tokens, learned from the corpus.

    Raises ValueError for a model or tokenizer that can't be extended, a corpus without new tokens, or an existing `output`, and
    VerificationError if the directory doesn't pass. Nothing is then left behind. One copy of the weights is held, in float32.
    """
    exported_output(output, overwrite)
    tokenizer = tokenizer_of(model_name)
    old = tokenizer.backend_tokenizer
    require_extendable(model_name, old)
    learned = new_tokens.learn(old, corpus.learned, tokens)
    if not learned:
        raise ValueError("The corpus has no pair of tokens that comes twice within a word: there is nothing to learn.")
    made_of = new_tokens.made_of(old, learned)
    tokenizer._tokenizer = new_tokens.extended(old, learned)
    whole_texts(old)
    with replacing(output, 0, "The model") as temporary:
        with on_disk(output, temporary, "the weights of the model have to fit"):
            probe = old.encode(corpus.held_out[0], add_special_tokens=False).ids[:PROBE_TOKENS]
            before = write_extended(
                model_name, temporary, new_tokens.size(old), probe, list(made_of.values()), max_shard_size, seed
            )
            tokenizer.save_pretrained(temporary)
        return prove(temporary, before, old, corpus.held_out)


def whole_texts(tokenizer: Tokenizer) -> None:
    """Encode a text as it is, whatever the tokenizer's file asks for."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


def tokenizer_of(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model. Raises ValueError where there is none that can be extended."""
    tokenizer = tokenizer_beside(model_name)
    if tokenizer is None:
        raise ValueError(f"{model_name!r} has no tokenizer.")
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer of {model_name!r} has no fast version (tokenizer.json), which is what is extended."
        )
    new_tokens.require_extendable(tokenizer.backend_tokenizer)
    return tokenizer


def require_extendable(model_name: str, tokenizer: Tokenizer) -> None:
    """Raises ValueError for a model that can't get more rows."""
    config = load_config(model_name)
    if not has_weights(model_name):
        raise ValueError(
            f"{model_name!r} has no weights: take prepare_data.py --train_tokenizer for a model from scratch."
        )
    if (Path(model_name) / "weights").is_dir():
        raise ValueError(f"{model_name!r} is a sharded checkpoint: export it with export_hf.py first.")
    new_rows.require_resizable(checked_skeleton(model_name, config, torch.float32))
    tokens, rows = new_tokens.size(tokenizer), config.get_text_config().vocab_size
    if tokens > rows:
        raise ValueError(f"The tokenizer of {model_name!r} has {tokens} tokens, but its model {rows} embeddings.")


def write_extended(
    model_name: str,
    folder: Path,
    first: int,
    probe: list[int],
    made_of: list[list[int]],
    max_shard_size: str,
    seed: int,
) -> Before:
    """Write the model with rows `first` and following for the new tokens, see `new_rows.add_rows`. Returns what it was."""
    model = load_reference(model_name, load_config(model_name), "auto", seed=0)
    dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    input_ids = torch.tensor([probe])
    before = Before(
        first,
        rows_of(model),
        input_ids,
        logits_of(model.float(), input_ids)[:, :first],
        digests(model, first, dtypes),
    )
    new_rows.add_rows(model, first, made_of, seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data = tensor.data.to(dtypes[name])
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    files.room(folder.parent, needed, "The extended model", "make room, or take an --output on another disk")
    model.config.dtype = dtypes[next(name for name, _ in model.named_parameters())]
    write_model(folder, model_name, model, max_shard_size)
    return before


def rows_of(model: PreTrainedModel) -> int:
    """The rows of the embedding."""
    return len(model.get_input_embeddings().weight)


@torch.no_grad()
def logits_of(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """float32 [tokens, vocabulary]. model: in float32."""
    return model.eval()(input_ids).logits[0]


def digests(model: PreTrainedModel, first: int, dtypes: dict[str, torch.dtype]) -> dict[str, str]:
    """A hash of each parameter's bits in its dtype, of the embedding and the head those of the tokens before `first`."""
    head = model.get_output_embeddings()
    tables = {id(model.get_input_embeddings().weight), *(id(parameter) for parameter in head.parameters())}
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()[:first] if id(parameter) in tables else parameter.detach()
        bits = values.to(dtypes[name]).contiguous().view(-1).view(torch.uint8)
        found[name] = hashlib.blake2b(bits.numpy(), digest_size=16).hexdigest()
    return found


def prove(folder: Path, before: Before, old: Tokenizer, held_out: list[str]) -> Extension:
    """Open `folder` with plain transformers, and compare it with what was. Raises VerificationError."""
    measured = compare_tokenizers(folder, old, before.first, held_out)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise VerificationError(f"{kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[:10]}.")
    rows, tokens = rows_of(model), new_tokens.size(tokenizer_beside(str(folder)).backend_tokenizer)
    if not len(model.get_output_embeddings().weight) == model.config.get_text_config().vocab_size == rows >= tokens:
        raise VerificationError(f"the model has {rows} embeddings for {tokens} tokens, and says otherwise.")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    found = digests(model, before.first, dtypes)
    if found != before.digests:
        wrong = sorted(
            name for name in found.keys() | before.digests.keys() if found.get(name) != before.digests.get(name)
        )
        raise VerificationError(f"the old values of {wrong[0]} have changed.")
    logits = logits_of(model.float(), before.probe)[:, : before.first]
    difference = ((logits - before.logits).abs().max() / before.logits.std()).item()
    if not difference <= ROUNDING:  # also where it is NaN
        raise VerificationError(
            f"the logits of old tokens differ by up to {difference:.1e} of their standard deviation."
        )
    return Extension(
        tokens=tokens - before.first,
        vocabulary=(before.first, tokens),
        rows=(before.rows, rows),
        parameters=len(found),
        logits_difference=difference,
        held_out=measured,
    )


def compare_tokenizers(folder: Path, old: Tokenizer, first: int, held_out: list[str]) -> Measured:
    """The tokenizer in `folder` against the old one. Raises VerificationError where an old id, or a text, comes out otherwise."""
    new = tokenizer_beside(str(folder)).backend_tokenizer
    whole_texts(new)
    before, after = old.get_vocab(with_added_tokens=True), new.get_vocab(with_added_tokens=True)
    if moved := [token for token, number in before.items() if after.get(token) != number]:
        raise VerificationError(f"the token {moved[0]!r} has the id {after.get(moved[0])}, not {before[moved[0]]}.")
    added = [{number: repr(token) for number, token in t.get_added_tokens_decoder().items()} for t in (old, new)]
    if added[0] != added[1]:
        raise VerificationError("its added tokens are others.")
    unknown = new_tokens.unknown_id(old)
    counts, seen, with_unknown = [0, 0], set(), 0
    for text in held_out:
        ids, new_ids = (t.encode(text, add_special_tokens=False).ids for t in (old, new))
        same = old.decode(ids, skip_special_tokens=False)
        if new.decode(ids, skip_special_tokens=False) != same:
            raise VerificationError(f"old ids of a text decode otherwise: {text[:60]!r}.")
        if unknown in ids:
            with_unknown += 1
        elif new.decode(new_ids, skip_special_tokens=False) != same:
            raise VerificationError(f"a text doesn't come back: {text[:60]!r}.")
        counts = [counts[0] + len(ids), counts[1] + len(new_ids)]
        seen.update(number for number in new_ids if number >= first)
    size = sum(len(text.encode()) for text in held_out)
    return Measured(len(held_out), size, *counts, len(seen), with_unknown)


def read_extension(extension: Extension) -> list[str]:
    """Lines that say what was added and measured."""
    e, held_out = extension, extension.held_out
    before, after = (count / max(1, held_out.bytes) for count in (held_out.before, held_out.after))
    unknown = (
        f", but for {held_out.with_unknown} with characters that were unknown before" if held_out.with_unknown else ""
    )
    logits = (
        "bit-equal"
        if e.logits_difference == 0
        else f"equal to rounding ({e.logits_difference:.0e} of their standard deviation at most): a matrix of another width goes "
        "through another kernel"
    )
    return [
        f"{e.tokens} tokens more: {e.vocabulary[0]} -> {e.vocabulary[1]} tokens, {e.rows[0]} -> {e.rows[1]} embeddings.",
        f"Held-out text ({held_out.texts} texts, {held_out.bytes:,} bytes): {before:.4f} tokens a byte before, {after:.4f} now "
        f"({1 - after / before:.1%} fewer); {held_out.new} of the new tokens occur; all texts decode to what they did{unknown}.",
        f"Old tokens have their ids, all {e.parameters} tensors of weights keep their old bits, and the logits of old tokens are "
        f"{logits}.",
    ]
