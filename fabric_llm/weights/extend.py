"""A model with more tokens: learned from a corpus, appended to its tokenizer, given rows, written,
and proven."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fabric_llm.base import files
from fabric_llm.checkpoint import keep
from fabric_llm.model import loading
from fabric_llm.model.reference import load_reference
from fabric_llm.model.tokenizer import SENTENCEPIECE, save_tokenizer
from fabric_llm.model.weights import Source
from fabric_llm.prepare.corpus import Corpus
from fabric_llm.prepare.new_tokens import (
    extended,
    learn,
    made_of,
    require_extendable,
    size,
    unknown_id,
)
from fabric_llm.weights.export import (
    VerificationError,
    logits_of,
    opened,
    replacing,
    require_weights,
    write_model,
)

PROBE_TOKENS = 64
# The largest difference of float32 logits, as a fraction of their standard deviation, that
# another kernel explains.
ROUNDING = 1e-5
MULTIPLE = 128  # of rows: a table padded to a divisor of it, from 8 on, stays so
MIN_MULTIPLE = 8


def extend(model_name: str, corpus: Corpus, output: Path, tokens: int) -> list[str]:
    """Write `output`, the model with at most `tokens` more tokens, learned from the corpus. Returns
    lines that describe it.

    Raises ValueError for a model or corpus that doesn't suit, and VerificationError. Nothing is
    then left behind. For its logits the model is held in float32, before it is extended and after.
    """
    loading.disable_progress_bar()
    # A checkpoint says what its files should be, and a plain model doesn't.
    if (Path(model_name) / files.MANIFEST).is_file():
        keep.whole(Path(model_name))
    config = loading.load_config(model_name)
    dtype = loading.stored_dtype(model_name, config)
    tokenizer = extendable_tokenizer(model_name, config)
    old = tokenizer.backend_tokenizer
    learned = learn(old, corpus.learned, tokens)
    if not learned:
        raise ValueError(
            "The corpus has no pair of tokens that comes twice within a word: there is nothing to "
            "learn."
        )
    # The tokens that the text of each new one is made of until now.
    parts = [made_of(old, token.text) for token in learned]
    tokenizer._tokenizer = extended(old, learned)
    # From here on `old` encodes a text as it is, whatever its file asks for. Its copy, which is
    # saved, was made before, and keeps what the file asks for.
    old.no_truncation()
    old.no_padding()
    first = size(old)
    # Of a text that nothing was learned from.
    probe = torch.tensor(
        [old.encode(corpus.held_out[0], add_special_tokens=False).ids[:PROBE_TOKENS]]
    )

    weights = loading.open_weights(model_name, config, dtype)
    model = load_reference(loading.build_skeleton(config, dtype), weights)
    tables, rows = tables_of(model), model.get_input_embeddings().num_embeddings
    # Rows behind the last token aren't compared: new tokens take them.
    before = logits_of(model.float(), probe)[:, :first]
    # `compare_models` opens another whole model.
    del model
    now = rows_for(first + len(learned), rows)
    # Reads the old weights and makes the new rows when they are written.
    longer = Extended(weights, tables, first, parts, now)
    config = deepcopy(config)  # the former is that of the weights
    # Of a model with other parts, such as images, the text has a configuration of its own.
    config.get_text_config().vocab_size = now
    skeleton = loading.build_skeleton(config, dtype)
    with replacing(output, skeleton, "The extended model") as folder:
        write_model(folder, model_name, skeleton, longer)
        # In place of the old one, which `write_model` has put there.
        save_tokenizer(tokenizer, folder)
        (folder / SENTENCEPIECE).unlink(missing_ok=True)  # it has no new tokens
        # Read back, so that what is compared is what a user will load.
        new = loading.tokenizer_beside(str(folder)).backend_tokenizer
        return [
            (
                f"{len(learned)} tokens more: {first} -> {first + len(learned)} tokens, {rows} -> "
                f"{now} embeddings."
            ),
            compare_tokenizers(old, new, corpus.held_out),
            compare_models(folder, longer, size(new), probe, before),
        ]


def extendable_tokenizer(model_name: str, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model. Raises ValueError where it, or the model, can't be extended."""
    tokenizer = loading.tokenizer_beside(model_name)
    if tokenizer is None or not tokenizer.is_fast:
        raise ValueError(
            f"{model_name!r} has no tokenizer with a tokenizer.json, which is what is extended."
        )
    require_extendable(tokenizer.backend_tokenizer)
    model = loading.checked_skeleton(model_name, config, torch.float32)
    text_config, head = model.config.get_text_config(), model.get_output_embeddings()
    sizes = (text_config.vocab_size, getattr(text_config, "vocab_size_per_layer_input", None))
    # Some models, such as Gemma 3n, have tables for each layer, which would need rows as well.
    tables = [
        m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings in sizes
    ]
    if (
        tables != [model.get_input_embeddings()]
        or not isinstance(head, nn.Linear)
        or len(head.weight) != sizes[0]
    ):
        raise ValueError(
            f"{type(model).__name__} has not one plain embedding and one output head of "
            f"{sizes[0]} rows: it can't be extended here."
        )
    # The ids behind the last row would have no embedding.
    if (tokens := size(tokenizer.backend_tokenizer)) > sizes[0]:
        raise ValueError(
            f"The tokenizer of {model_name!r} has {tokens} tokens, but its model {sizes[0]} "
            "embeddings."
        )
    return tokenizer


def rows_for(tokens: int, rows: int) -> int:
    """How many rows a model with `rows` of them has for `tokens` tokens: unused ones are taken
    first, padding is kept."""
    if tokens <= rows:
        return rows
    # Padded tables, such as to a multiple of 64, are fast on GPUs and divide among ranks.
    multiple = math.gcd(rows, MULTIPLE)
    return tokens if multiple < MIN_MULTIPLE else -(-tokens // multiple) * multiple


def tables_of(model: PreTrainedModel) -> set[str]:
    """Names of what has a row for each token: the embedding, and the weight and bias of the output
    head."""
    # By identity: a head that is tied to the embedding has no name of its own.
    tables = {
        id(model.get_input_embeddings().weight),
        *map(id, model.get_output_embeddings().parameters()),
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in tables}


@dataclass(frozen=True)
class Extended:
    """The weights of a model, its tables with rows for new tokens. A `Source`."""

    weights: Source
    tables: set[str]
    first: int  # new token
    parts: Sequence[Sequence[int]]  # see `with_rows`
    rows: int

    def read(self, unit: str) -> dict[str, Tensor]:
        tensors = self.weights.read(unit)
        for name in tensors.keys() & self.tables:
            tensors[name] = with_rows(tensors[name], self.first, self.parts, self.rows)
        return tensors


def with_rows(table: Tensor, first: int, parts: Sequence[Sequence[int]], rows: int) -> Tensor:
    """`table`, [tokens, width] or [tokens] of a bias, with `rows` rows, of which `first` and those
    behind it are the new tokens'.

    parts: the old tokens that the text of each was until now. Its row is the mean of their rows,
    among the best starts of those compared (arXiv:2407.05841); of none, and behind the last token
    of a longer table, the mean of all. In the head the logit of a new token is then at most the
    largest of its parts: it can't take the place of what the model knows, which random rows can
    (Hewitt 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """
    # A mean of rows in 16 bits would be rounded at each step.
    old, end = table[:first].float(), first + len(parts)
    mean = old.mean(dim=0)
    new = []
    for part in parts:
        new.append(old[list(part)].mean(dim=0) if part else mean)
    # Rows that the model has but no token uses stay as they are.
    unused = table[end:] if rows == len(table) else mean.expand(rows - end, *mean.shape)
    return torch.cat([table[:first], torch.stack(new).to(table.dtype), unused.to(table.dtype)])


def compare_models(
    folder: Path, longer: Extended, tokens: int, probe: Tensor, before: Tensor
) -> str:
    """Open `folder` with plain transformers, and compare it with the weights before they were
    extended, and their logits.

    tokens: old and new. probe: int64 [1, n]. before: float32 [n, old tokens]. Returns what was
    found. Raises VerificationError.
    """
    model, first = opened(folder), longer.first
    rows = len(model.get_input_embeddings().weight)
    of_head = len(model.get_output_embeddings().weight)
    if {of_head, model.config.get_text_config().vocab_size} != {rows} or rows < tokens:
        raise VerificationError(
            f"the model has {rows} embeddings for {tokens} tokens, which its output head or its "
            "config.json contradicts."
        )
    # Behind `first` the tables have new rows, or padding that was taken.
    old_rows = dict.fromkeys(longer.tables, first)
    require_weights(model, longer.weights, "the old values of {} have changed", old_rows)
    parameters = len(list(model.parameters()))
    now = logits_of(model.float(), probe)[:, :first]
    difference = ((now - before).abs().max() / before.std()).item()
    differ = f"{difference:.1e} of their standard deviation"
    if not difference <= ROUNDING:  # also where it is NaN
        raise VerificationError(f"the logits of old tokens differ by up to {differ}.")
    # A matrix of another width goes through another kernel.
    equal = f"equal to rounding ({differ} at most)" if difference > 0 else "bit-equal"
    bits = f"all {parameters} tensors of weights keep their old bits"
    return f"Old tokens have their ids, {bits}, and the logits of old tokens are {equal}."


def compare_tokenizers(old: Tokenizer, new: Tokenizer, held_out: list[str]) -> str:
    """What both make of texts, in a sentence. Raises VerificationError where an old id, or a text,
    comes out otherwise."""
    new.no_truncation()
    new.no_padding()
    before, after = old.get_vocab(with_added_tokens=True), new.get_vocab(with_added_tokens=True)
    if moved := [token for token, number in before.items() if after.get(token) != number]:
        raise VerificationError(
            f"the token {moved[0]!r} has the id {after.get(moved[0])}, not {before[moved[0]]}."
        )
    # Old special tokens must still be found in text, with their options.
    added, added_now = (sorted(map(str, t.get_added_tokens_decoder().items())) for t in (old, new))
    if added != added_now:
        raise VerificationError("its added tokens have changed.")
    unknown, count, count_now, with_unknown = unknown_id(old), 0, 0, 0
    for text in held_out:
        ids, ids_now = (t.encode(text, add_special_tokens=False).ids for t in (old, new))
        # What the old tokenizer makes of its own tokens: the text itself, but for normalization.
        same = old.decode(ids, skip_special_tokens=False)
        if new.decode(ids, skip_special_tokens=False) != same:
            raise VerificationError(f"old ids of a text decode otherwise: {text[:60]!r}.")
        if unknown in ids:
            # The text didn't come back before either: what <unk> stood for was lost.
            with_unknown += 1
        elif new.decode(ids_now, skip_special_tokens=False) != same:
            raise VerificationError(f"a text doesn't come back: {text[:60]!r}.")
        count, count_now = count + len(ids), count_now + len(ids_now)
    whole = sum(len(text.encode()) for text in held_out)
    but = ""
    if with_unknown:
        but = f", but for {with_unknown} with characters that were unknown before"
    gained = "" if count_now < count else " Nothing is gained: the old tokenizer is as good."
    return (
        f"Held-out text ({len(held_out)} texts, {whole:,} bytes): {count / max(1, whole):.4f} "
        f"tokens a byte before, {count_now / max(1, whole):.4f} now ({1 - count_now / count:.1%} "
        f"fewer); all texts decode to what they did{but}.{gained}"
    )
