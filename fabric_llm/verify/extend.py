"""A model with more tokens: its tokenizer extended, rows added, written as a Hugging Face directory, and proven there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fabric_llm.model.loading import checked_skeleton, has_weights, load_config, load_reference, tokenizer_beside
from fabric_llm.prepare.corpus import Corpus
from fabric_llm.verify import new_rows, new_tokens
from fabric_llm.verify.model_folder import VerificationError, bytes_of, logits_of, opened, replacing, write_model

PROBE_TOKENS = 64
# The largest difference of float32 logits, as a part of their standard deviation, that another kernel explains.
ROUNDING = 1e-5


class Old(NamedTuple):
    """What a model makes of its old tokens, before or after it is extended."""

    rows: int  # of the embedding
    digests: dict[str, str]  # of the bits of each parameter, of the embedding and the head those of old tokens
    logits: Tensor  # float32 [probe tokens, old tokens]


def extend(
    model_name: str, corpus: Corpus, output: Path, *, tokens: int, max_shard_size: str = "5GB", seed: int = 0
) -> list[str]:
    """Write `output`, the model with at most `tokens` more tokens, learned from the corpus. Returns lines that describe it.

    Raises ValueError for a model or tokenizer that can't be extended, or a corpus without new tokens, and VerificationError if the
    directory doesn't pass. Nothing is then left behind. One copy of the weights is held, in float32.
    """
    tokenizer = extendable_tokenizer(model_name)
    old = tokenizer.backend_tokenizer
    require_extendable(model_name, old)
    learned = new_tokens.learn(old, corpus.learned, tokens)
    if not learned:
        raise ValueError("The corpus has no pair of tokens that comes twice within a word: there is nothing to learn.")
    made_of = list(new_tokens.made_of(old, learned).values())
    tokenizer._tokenizer = new_tokens.extended(old, learned)
    whole_texts(old)
    first = new_tokens.size(old)
    probe = torch.tensor([old.encode(corpus.held_out[0], add_special_tokens=False).ids[:PROBE_TOKENS]])

    model = load_reference(model_name, load_config(model_name), "auto", seed=0)
    dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    before = measure(model, probe, first)  # in float32 from here on
    new_rows.add_rows(model, first, made_of, seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(dtypes[name])
    model.config.dtype = next(model.parameters()).dtype
    with replacing(output, bytes_of(model), "The extended model") as temporary:
        write_model(temporary, model_name, model.config, model.dtype, model.state_dict(), max_shard_size)
        tokenizer.save_pretrained(temporary)
        del model
        return prove(temporary, before, probe, old, corpus.held_out)


def whole_texts(tokenizer: Tokenizer) -> None:
    """Encode a text as it is, whatever the tokenizer's file asks for."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


def extendable_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
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


def rows_of(model: PreTrainedModel) -> int:
    """The rows of the embedding."""
    return len(model.get_input_embeddings().weight)


def measure(model: PreTrainedModel, probe: Tensor, first: int) -> Old:
    """What the model makes of the tokens before `first`. It is in float32 afterwards. probe: int64 [1, tokens]."""
    tables = {id(model.get_input_embeddings().weight), *map(id, model.get_output_embeddings().parameters())}
    digests = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()[:first] if id(parameter) in tables else parameter.detach()
        bits = values.contiguous().view(-1).view(torch.uint8)
        digests[name] = hashlib.blake2b(bits.numpy(), digest_size=16).hexdigest()
    return Old(rows_of(model), digests, logits_of(model.float(), probe)[:, :first])


def prove(folder: Path, before: Old, probe: Tensor, old: Tokenizer, held_out: list[str]) -> list[str]:
    """Open `folder` with plain transformers, and compare it with what was. Returns what was found. Raises VerificationError."""
    new = tokenizer_beside(str(folder)).backend_tokenizer
    first, tokens = new_tokens.size(old), new_tokens.size(new)
    about_texts = compare_tokenizers(old, new, held_out)
    model = opened(folder)
    rows = rows_of(model)
    if not len(model.get_output_embeddings().weight) == model.config.get_text_config().vocab_size == rows >= tokens:
        raise VerificationError(f"the model has {rows} embeddings for {tokens} tokens, and says otherwise.")
    after = measure(model, probe, first)
    for name in sorted(before.digests.keys() | after.digests.keys()):
        if before.digests.get(name) != after.digests.get(name):
            raise VerificationError(f"the old values of {name} have changed.")
    difference = ((after.logits - before.logits).abs().max() / before.logits.std()).item()
    if not difference <= ROUNDING:  # also where it is NaN
        raise VerificationError(
            f"the logits of old tokens differ by up to {difference:.1e} of their standard deviation."
        )
    logits = "bit-equal"
    if difference > 0:
        logits = (
            f"equal to rounding ({difference:.0e} of their standard deviation at most): a matrix of another width goes through "
            "another kernel"
        )
    return [
        f"{tokens - first} tokens more: {first} -> {tokens} tokens, {before.rows} -> {rows} embeddings.",
        about_texts,
        f"Old tokens have their ids, all {len(after.digests)} tensors of weights keep their old bits, and the logits of old tokens "
        f"are {logits}.",
    ]


def compare_tokenizers(old: Tokenizer, new: Tokenizer, held_out: list[str]) -> str:
    """What both make of texts, in a sentence. Raises VerificationError where an old id, or a text, comes out otherwise."""
    whole_texts(new)
    before, after = old.get_vocab(with_added_tokens=True), new.get_vocab(with_added_tokens=True)
    if moved := [token for token, number in before.items() if after.get(token) != number]:
        raise VerificationError(f"the token {moved[0]!r} has the id {after.get(moved[0])}, not {before[moved[0]]}.")
    added = [{number: repr(token) for number, token in t.get_added_tokens_decoder().items()} for t in (old, new)]
    if added[0] != added[1]:
        raise VerificationError("its added tokens are others.")
    unknown, first = new_tokens.unknown_id(old), new_tokens.size(old)
    old_count = new_count = with_unknown = 0
    seen: set[int] = set()
    for text in held_out:
        old_ids, new_ids = (t.encode(text, add_special_tokens=False).ids for t in (old, new))
        same = old.decode(old_ids, skip_special_tokens=False)
        if new.decode(old_ids, skip_special_tokens=False) != same:
            raise VerificationError(f"old ids of a text decode otherwise: {text[:60]!r}.")
        if unknown in old_ids:  # the text didn't come back before either
            with_unknown += 1
        elif new.decode(new_ids, skip_special_tokens=False) != same:
            raise VerificationError(f"a text doesn't come back: {text[:60]!r}.")
        old_count += len(old_ids)
        new_count += len(new_ids)
        seen.update(number for number in new_ids if number >= first)
    size = sum(len(text.encode()) for text in held_out)
    but = f", but for {with_unknown} with characters that were unknown before" if with_unknown else ""
    return (
        f"Held-out text ({len(held_out)} texts, {size:,} bytes): {old_count / max(1, size):.4f} tokens a byte before, "
        f"{new_count / max(1, size):.4f} now ({1 - new_count / old_count:.1%} fewer); {len(seen)} of the new tokens occur; all texts "
        f"decode to what they did{but}."
    )
