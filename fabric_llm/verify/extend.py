"""A model with more tokens: learned from a corpus, appended to its tokenizer, given rows, written, and proven.

Byte-pair encoding goes on where the tokenizer stopped: the words of the corpus are cut into its own tokens, and the most frequent
pair of neighbours becomes a new token, again and again (Sennrich et al. 2016, arXiv:1508.07909, from a vocabulary instead of
letters; the trainers of `tokenizers` begin anew). New merges have the last ranks: a text is first cut as before, and only then are
tokens joined. So a text without a new token has the ids that it had, and tokens apply inside of words, which `add_tokens` would
tear apart. A Unigram model, which takes the likeliest cut, gets pieces with the logarithm of their share of the corpus' tokens, and
at least a little more than the cut that each replaces has, or it would never be taken.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fabric_llm.data.token_bytes import is_byte_level
from fabric_llm.model import loading
from fabric_llm.model.reference import load_model
from fabric_llm.prepare.corpus import Corpus
from fabric_llm.verify.export import VerificationError, bytes_of, logits_of, opened, replacing, write_model

PROBE_TOKENS = 64
# The largest difference of float32 logits, as a part of their standard deviation, that another kernel explains.
ROUNDING = 1e-5
MULTIPLE = 128  # of rows: a vocabulary that is padded to a divisor of it, at least 8, stays so
LEAST_MULTIPLE = 8
LONGEST_TOKEN = 64  # characters; of bytes in byte-level BPE
LEAST_COUNT = 2  # a pair that comes once is no word
MARGIN = 1e-3  # nats, of a new piece above what it replaces
# SentencePiece learns from words with the space before them, of one kind of letters, and from single digits; the tokenizers that it
# makes don't split texts at all.
WORDS = Regex(r"▁*[\p{L}\p{M}]+|▁*\p{N}|▁*[^▁\s\p{L}\p{M}\p{N}]+|▁+|\s+")
Candidate = tuple[str, ...]  # what could be a token: a pair of tokens, or one character that no token has


def extend(model_name: str, corpus: Corpus, output: Path, tokens: int) -> list[str]:
    """Write `output`, the model with at most `tokens` more tokens, learned from the corpus. Returns lines that describe it.

    Raises ValueError for a model or corpus that doesn't suit, and VerificationError. Nothing is then left behind. One copy of the
    weights is held, in float32.
    """
    loading.disable_progress_bar()
    tokenizer = extendable_tokenizer(model_name)
    old = tokenizer.backend_tokenizer
    learned = learn(old, corpus.learned, tokens)
    if not learned:
        raise ValueError("The corpus has no pair of tokens that comes twice within a word: there is nothing to learn.")
    parts = [made_of(old, token.text) for token in learned]
    tokenizer._tokenizer = extended(old, learned)
    old.no_truncation()  # from here on a text is encoded as it is, whatever the tokenizer's file asks for
    old.no_padding()
    first = size(old)
    probe = torch.tensor([old.encode(corpus.held_out[0], add_special_tokens=False).ids[:PROBE_TOKENS]])

    config = loading.load_config(model_name)
    model = load_model(model_name, config, config.dtype or torch.float32)
    rows = model.get_input_embeddings().num_embeddings
    dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    before = measure(model, probe, first)  # in float32 from here on
    add_rows(model, first, parts)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(dtypes[name])
    model.config.dtype = next(model.parameters()).dtype
    now = model.get_input_embeddings().num_embeddings
    with replacing(output, bytes_of(model), "The extended model") as folder:
        write_model(folder, model_name, loading.build_skeleton(model.config, model.dtype), model.state_dict())
        tokenizer.save_pretrained(folder)
        del model
        new = loading.tokenizer_beside(str(folder)).backend_tokenizer
        return [
            f"{len(learned)} tokens more: {first} -> {first + len(learned)} tokens, {rows} -> {now} embeddings.",
            compare_tokenizers(old, new, corpus.held_out),
            compare_models(before, folder, probe, first, size(new)),
        ]


def extendable_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model. Raises ValueError where it, or the model, can't be extended."""
    tokenizer = loading.tokenizer_beside(model_name)
    if tokenizer is None or not tokenizer.is_fast:
        raise ValueError(f"{model_name!r} has no tokenizer with a tokenizer.json, which is what is extended.")
    require_extendable(tokenizer.backend_tokenizer)
    if not loading.has_weights(model_name) or (Path(model_name) / "weights").is_dir():
        raise ValueError(f"{model_name!r} has no weights, or is a sharded checkpoint: take an export of export_hf.py.")
    model = loading.checked_skeleton(model_name, loading.load_config(model_name), torch.float32)
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    sizes = (config.vocab_size, getattr(config, "vocab_size_per_layer_input", None))
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings in sizes]
    if tables != [model.get_input_embeddings()] or not isinstance(head, nn.Linear) or len(head.weight) != sizes[0]:
        name, rows = type(model).__name__, f"of {config.vocab_size} rows"
        raise ValueError(f"{name} has not one plain embedding and one output head {rows}: it can't be extended here.")
    if (tokens := size(tokenizer.backend_tokenizer)) > config.vocab_size:
        rows = config.vocab_size
        raise ValueError(f"The tokenizer of {model_name!r} has {tokens} tokens, but its model {rows} embeddings.")
    return tokenizer


def rows_for(tokens: int, rows: int) -> int:
    """How many rows a model with `rows` of them has for `tokens` tokens: unused ones are taken first, padding is kept."""
    if tokens <= rows:
        return rows
    multiple = math.gcd(rows, MULTIPLE)
    return tokens if multiple < LEAST_MULTIPLE else -(-tokens // multiple) * multiple


@torch.no_grad()
def add_rows(causal_lm: PreTrainedModel, first: int, parts: Sequence[Sequence[int]]) -> None:
    """Rows `first` and following for tokens whose text was the old tokens `parts` until now; the configuration follows.

    A row is the mean of the rows of those tokens, among the best starts of those compared (arXiv:2407.05841); of none, and behind
    the last token, the mean of all. In the head the logit of a new token is then at most the largest of its parts: it can't take
    the place of what the model knows, which random rows can (Hewitt 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """
    rows, end = causal_lm.get_input_embeddings().num_embeddings, first + len(parts)
    is_tied = causal_lm.get_input_embeddings().weight is causal_lm.get_output_embeddings().weight
    if end > rows:
        causal_lm.resize_token_embeddings(rows_for(end, rows), mean_resizing=False)
    embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    if is_tied and head.weight is not embeddings.weight:
        raise ValueError(f"{type(causal_lm).__name__} doesn't keep its tied weights tied when it is resized.")
    tables = [embeddings.weight, *([] if is_tied else [head.weight]), *([] if head.bias is None else [head.bias])]
    for table in tables:  # [rows, width], or [rows] of a bias
        mean = table[:first].mean(dim=0)
        for number, old in enumerate(parts, first):
            table[number] = table[list(old)].mean(dim=0) if old else mean
        if end > rows:
            table[end:] = mean


def measure(model: PreTrainedModel, probe: Tensor, first: int) -> tuple[dict[str, str], Tensor]:
    """(a digest of the bits of each parameter, of the embedding and the head those before `first`; float32 logits [tokens, first]).

    The model is in float32 afterwards. probe: int64 [1, tokens].
    """
    tables = {id(model.get_input_embeddings().weight), *map(id, model.get_output_embeddings().parameters())}
    digests = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()[:first] if id(parameter) in tables else parameter.detach()
        bits = values.contiguous().view(-1).view(torch.uint8)
        digests[name] = hashlib.blake2b(bits.numpy(), digest_size=16).hexdigest()
    return digests, logits_of(model.float(), probe)[:, :first]


def compare_models(before: tuple[dict[str, str], Tensor], folder: Path, probe: Tensor, first: int, tokens: int) -> str:
    """Open `folder` with plain transformers, and `measure` it as `before`. Returns what was found. Raises VerificationError."""
    model = opened(folder)
    rows = len(model.get_input_embeddings().weight)
    if not len(model.get_output_embeddings().weight) == model.config.get_text_config().vocab_size == rows >= tokens:
        raise VerificationError(f"the model has {rows} embeddings for {tokens} tokens, and says otherwise.")
    (digests, logits), (now, logits_now) = before, measure(model, probe, first)
    if changed := sorted(name for name in digests.keys() | now.keys() if digests.get(name) != now.get(name)):
        raise VerificationError(f"the old values of {changed[0]} have changed.")
    difference = ((logits_now - logits).abs().max() / logits.std()).item()
    differ = f"{difference:.1e} of their standard deviation"
    if not difference <= ROUNDING:  # also where it is NaN
        raise VerificationError(f"the logits of old tokens differ by up to {differ}.")
    # A matrix of another width goes through another kernel.
    equal = f"equal to rounding ({differ} at most)" if difference > 0 else "bit-equal"
    bits = f"all {len(now)} tensors of weights keep their old bits"
    return f"Old tokens have their ids, {bits}, and the logits of old tokens are {equal}."


def compare_tokenizers(old: Tokenizer, new: Tokenizer, held_out: list[str]) -> str:
    """What both make of texts, in a sentence. Raises VerificationError where an old id, or a text, comes out otherwise."""
    new.no_truncation()
    new.no_padding()
    before, after = old.get_vocab(with_added_tokens=True), new.get_vocab(with_added_tokens=True)
    if moved := [token for token, number in before.items() if after.get(token) != number]:
        raise VerificationError(f"the token {moved[0]!r} has the id {after.get(moved[0])}, not {before[moved[0]]}.")
    added, added_now = (sorted(map(str, t.get_added_tokens_decoder().items())) for t in (old, new))
    if added != added_now:
        raise VerificationError("its added tokens are others.")
    unknown, first = unknown_id(old), size(old)
    count = count_now = with_unknown = 0
    seen: set[int] = set()
    for text in held_out:
        ids, ids_now = (t.encode(text, add_special_tokens=False).ids for t in (old, new))
        same = old.decode(ids, skip_special_tokens=False)
        if new.decode(ids, skip_special_tokens=False) != same:
            raise VerificationError(f"old ids of a text decode otherwise: {text[:60]!r}.")
        if unknown in ids:  # the text didn't come back before either
            with_unknown += 1
        elif new.decode(ids_now, skip_special_tokens=False) != same:
            raise VerificationError(f"a text doesn't come back: {text[:60]!r}.")
        count, count_now = count + len(ids), count_now + len(ids_now)
        seen.update(number for number in ids_now if number >= first)
    whole = sum(len(text.encode()) for text in held_out)
    but = f", but for {with_unknown} with characters that were unknown before" if with_unknown else ""
    return (
        f"Held-out text ({len(held_out)} texts, {whole:,} bytes): {count / max(1, whole):.4f} tokens a byte before, "
        f"{count_now / max(1, whole):.4f} now ({1 - count_now / count:.1%} fewer); {len(seen)} of the new tokens occur; all texts "
        f"decode to what they did{but}."
    )


class NewToken(NamedTuple):
    """One token to append."""

    text: str  # as it stands in the vocabulary
    pair: Optional[tuple[str, str]]  # the tokens that it is made of; None for a character
    share: float  # of the corpus' tokens before there were new ones: the places where it was joined


def require_extendable(backend: Tokenizer) -> None:
    """Raises ValueError for a tokenizer that can't be extended here."""
    model = json.loads(backend.to_str())["model"]
    if model["type"] not in ("BPE", "Unigram"):
        raise ValueError(f"A {model['type']} tokenizer can't be extended: that needs BPE or Unigram.")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"A BPE tokenizer with {name} {model[name]!r} can't be extended.")


def learn(backend: Tokenizer, texts: Iterable[str], most: int) -> list[NewToken]:
    """At most `most` new tokens, those that save most tokens first. The same texts give the same tokens."""
    of_bytes = is_byte_level(backend)
    falls_back = bool(json.loads(backend.to_str())["model"].get("byte_fallback"))
    counts = Counter(word for text in texts for word in split(backend, text, of_bytes))
    tokens = set(backend.get_vocab(with_added_tokens=False))  # grows
    added = backend.get_vocab(with_added_tokens=True).keys() - tokens
    words: list[list[str]] = []  # tokens, and characters that no token has
    times = [counts[word] for word in sorted(counts)]
    for word in sorted(counts):
        words.append([])
        for is_known, letters in itertools.groupby(word, key=tokens.__contains__):
            words[-1] += [t.value for t in backend.model.tokenize("".join(letters))] if is_known else letters
    total = sum(time * len(symbols) for symbols, time in zip(words, times))
    saved: Counter[Candidate] = Counter()  # tokens of the corpus
    places: dict[Candidate, set[int]] = defaultdict(set)  # words, some of which had it before

    def count(index: int, sign: int) -> set[Candidate]:
        """Add, or take away, what the candidates in a word save. Returns them."""
        symbols, found = words[index], set()
        for symbol in symbols:
            if symbol not in tokens and not symbol.isspace():
                # As bytes it is several tokens. What is <unk> is lost: it counts once.
                saved[(symbol,)] += sign * times[index] * (len(symbol.encode()) - 1 if falls_back else 1)
                found.add((symbol,))
        for pair in itertools.pairwise(symbols):
            if pair[0] in tokens and pair[1] in tokens:
                saved[pair] += sign * times[index]
                found.add(pair)
        for candidate in found:
            places[candidate].add(index)
        return found

    for index in range(len(words)):
        count(index, 1)
    # The smallest is taken first: what saves most, then characters, then pairs.
    heap = [(-number, len(candidate), candidate) for candidate, number in saved.items()]
    heapq.heapify(heap)
    learned: list[NewToken] = []
    while heap and len(learned) < most:
        number, length, candidate = heapq.heappop(heap)
        text = "".join(candidate)
        is_known = text in tokens or text in added
        if -number != saved[candidate] or length == 2 and (is_known or len(text) > LONGEST_TOKEN):
            continue  # it was counted again since, or can't be a token
        if -number < LEAST_COUNT:
            break
        learned.append(NewToken(text, candidate if length == 2 else None, -number / total))
        after = {index: joined(words[index], candidate) for index in places.pop(candidate)}
        changed = [index for index in after if length == 1 or len(after[index]) < len(words[index])]
        again = {other for index in changed for other in count(index, -1)}
        tokens.add(text)
        for index in changed:
            words[index] = after[index]
            again |= count(index, 1)
        for other in again:
            if saved[other] > 0:
                heapq.heappush(heap, (-saved[other], len(other), other))
    return learned


def split(backend: Tokenizer, text: str, of_bytes: bool) -> list[str]:
    """The words of a text, in the letters of the vocabulary: no new token goes beyond one. of_bytes: see `is_byte_level`."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    parts = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    if of_bytes:
        return [word for word, _ in parts]
    inner = pre_tokenizers.Split(WORDS, "isolated")
    return [word for part, _ in parts if part for word, _ in inner.pre_tokenize_str(part)]


def joined(symbols: list[str], candidate: Candidate) -> list[str]:
    """A word in which each place of a candidate is one token."""
    found, at = [], 0
    while at < len(symbols):
        is_here = tuple(symbols[at : at + len(candidate)]) == candidate
        found.append("".join(candidate) if is_here else symbols[at])
        at += len(candidate) if is_here else 1
    return found


def extended(backend: Tokenizer, learned: list[NewToken]) -> Tokenizer:
    """`backend` with the tokens behind its last id."""
    state, first = json.loads(backend.to_str()), size(backend)
    model, vocab = state["model"], state["model"]["vocab"]
    added = {one["id"]: one["content"] for one in state["added_tokens"]}
    if model["type"] == "BPE":
        # Added tokens go into the vocabulary, as GPT-2 has them: `tokenizers` numbers those that aren't there behind all others.
        vocab |= {content: number for number, content in added.items()}
        vocab |= {token.text: number for number, token in enumerate(learned, first)}
        model["merges"] += [list(token.pair) for token in learned if token.pair is not None]
    else:
        # The place of a piece in the list is its id: added tokens behind the old pieces get places, as unlikely as any.
        scores = dict(vocab)
        least = min(scores.values())
        vocab += [[added.get(number, f"<no token {number}>"), least] for number in range(len(vocab), first)]
        for token in learned:
            replaced = sum(scores[part] for part in token.pair) + MARGIN if token.pair else least
            scores[token.text] = max(math.log(token.share), replaced)
            vocab.append([token.text, scores[token.text]])
    return Tokenizer.from_str(json.dumps(state, ensure_ascii=False))


def size(backend: Tokenizer) -> int:
    """One more than the largest id, those of added tokens included."""
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def unknown_id(backend: Tokenizer) -> Optional[int]:
    """The id of characters that no token has, None where there is no such token."""
    model = json.loads(backend.to_str())["model"]
    return model.get("unk_id") if model["type"] == "Unigram" else backend.token_to_id(model.get("unk_token") or "")


def made_of(backend: Tokenizer, text: str) -> list[int]:
    """The ids of the old tokens that the text of a new one is without it, but for <unk>."""
    unknown = unknown_id(backend)
    return [token.id for token in backend.model.tokenize(text) if token.id != unknown]
