"""New tokens for a tokenizer that is there: learned from a corpus, appended to its vocabulary, and to its merges.

Byte-pair encoding goes on where the tokenizer stopped: the words of the corpus, split as the tokenizer splits them, are cut into
its own tokens, and the most frequent pair of neighbours becomes a new token, again and again (Sennrich et al. 2016,
arXiv:1508.07909, from a vocabulary instead of letters). Each new token stands for two that are there, so that all pieces on the
way are in the vocabulary, and no token is out of reach. New merges have the last ranks: a text is first cut as before, and only
then are tokens joined. So a text without a new token has the ids that it had, and tokens apply inside of words as well, which
`add_tokens` would tear apart.

| tokenizer                                              | what is appended                                                  |
|--------------------------------------------------------|-------------------------------------------------------------------|
| BPE on bytes (GPT-2, Llama 3, Qwen)                    | tokens and merges                                                 |
| BPE of SentencePiece (Llama 2, Mistral, Gemma)         | tokens and merges; characters that were bytes (`<0xE4>`) or <unk> |
| Unigram (T5, XLM-R, XGLM)                              | pieces with a log probability; characters that were <unk>         |

A Unigram model takes the likeliest cut of a text. A new piece gets the logarithm of its share of all tokens of the corpus, and at
least a little more than the cut that it replaces has, or it would never be taken.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from tokenizers import Regex, Tokenizer, pre_tokenizers

from fabric_llm.data.token_bytes import is_byte_level

LONGEST_TOKEN = 64  # characters; of bytes in byte-level BPE
LEAST_COUNT = 2  # a pair that comes once is no word
MARGIN = 1e-3  # nats, of a new piece above what it replaces
# SentencePiece learns from words with the space before them, of one kind of letters, and from single digits; the tokenizers that it
# makes don't split texts at all.
WORDS = Regex(r"▁*[\p{L}\p{M}]+|▁*\p{N}|▁*[^▁\s\p{L}\p{M}\p{N}]+|▁+|\s+")


class NewToken(NamedTuple):
    """One token to append."""

    text: str  # as it stands in the vocabulary
    pair: Optional[tuple[str, str]]  # the tokens that it is made of; None for a character
    share: float  # of the corpus' tokens before there were new ones: the places where it was joined


class Lacked(str):
    """A character that no token has. It is no part of a pair until it is a token itself."""


Candidate = tuple[str, ...]  # what could be a token: a pair of tokens, or one lacked character


@dataclass
class Words:
    """The words of a corpus, and what each candidate would save in them."""

    symbols: list[list[str]]  # of each word: its tokens and lacked characters
    counts: list[int]  # of each word in the corpus
    falls_back: bool  # characters that no token has are bytes, and not <unk>
    saved: Counter = field(default_factory=Counter)  # candidate -> tokens of the corpus
    # Candidate -> words, some of which had it before.
    places: dict[Candidate, set[int]] = field(default_factory=lambda: defaultdict(set))


def require_extendable(backend: Tokenizer) -> None:
    """Raises ValueError, with a sentence, for a tokenizer that can't be extended here."""
    model = json.loads(backend.to_str())["model"]
    if model["type"] not in ("BPE", "Unigram"):
        raise ValueError(f"A {model['type']} tokenizer can't be extended: that needs BPE or Unigram.")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"A BPE tokenizer with {name} {model[name]!r} can't be extended.")


def learn(backend: Tokenizer, texts: Iterable[str], most: int) -> list[NewToken]:
    """At most `most` new tokens, those that save most tokens first. The same texts give the same tokens."""
    words = _words(backend, texts)
    vocabulary = set(backend.get_vocab(with_added_tokens=True))
    total = sum(count * len(symbols) for symbols, count in zip(words.symbols, words.counts))
    for index in range(len(words.symbols)):
        _count(words, index, 1)
    heap = [_rank(words, candidate) for candidate in words.saved]
    heapq.heapify(heap)
    found: list[NewToken] = []
    while heap and len(found) < most:
        saved, *_, candidate = heapq.heappop(heap)
        text = "".join(candidate)
        is_pair = len(candidate) == 2
        if -saved != words.saved[candidate] or is_pair and (text in vocabulary or len(text) > LONGEST_TOKEN):
            continue  # it was counted again since, or can't be a token
        if -saved < LEAST_COUNT:
            break
        found.append(NewToken(text, candidate if is_pair else None, -saved / total))
        vocabulary.add(text)
        for other in _put(words, candidate, text):
            heapq.heappush(heap, _rank(words, other))
    return found


def _words(backend: Tokenizer, texts: Iterable[str]) -> Words:
    counts: Counter[str] = Counter()
    of_bytes = is_byte_level(backend)
    for text in texts:
        counts.update(split(backend, text, of_bytes))
    known = {token for token in backend.get_vocab(with_added_tokens=False) if len(token) == 1}
    ordered = sorted(counts)
    symbols = [list(_symbols(backend, word, known)) for word in ordered]
    falls_back = bool(json.loads(backend.to_str())["model"].get("byte_fallback"))
    return Words(symbols, [counts[word] for word in ordered], falls_back)


def split(backend: Tokenizer, text: str, of_bytes: bool) -> list[str]:
    """The words of a text, in the letters of the vocabulary: no new token goes beyond one. of_bytes: see `is_byte_level`."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    parts = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    if of_bytes:
        return [word for word, _ in parts]
    inner = pre_tokenizers.Split(WORDS, "isolated")
    return [word for part, _ in parts if part for word, _ in inner.pre_tokenize_str(part)]


def _symbols(backend: Tokenizer, word: str, known: set[str]) -> Iterator[str]:
    """The tokens and the lacked characters of a word."""
    for is_known, letters in itertools.groupby(word, key=known.__contains__):
        if is_known:
            yield from (token.value for token in backend.model.tokenize("".join(letters)))
        else:
            yield from map(Lacked, letters)


def _candidates(words: Words, index: int) -> Iterator[tuple[Candidate, int]]:
    """(candidate, tokens that it saves at one place) for each place of a word."""
    symbols = words.symbols[index]
    for symbol in symbols:
        if isinstance(symbol, Lacked) and not symbol.isspace():
            # What is <unk> is lost: it counts once.
            yield (symbol,), len(symbol.encode()) - 1 if words.falls_back else 1
    for pair in zip(symbols, symbols[1:]):
        if not (isinstance(pair[0], Lacked) or isinstance(pair[1], Lacked)):
            yield pair, 1


def _count(words: Words, index: int, sign: int) -> set[Candidate]:
    """Add, or take away, what the candidates in a word save. Returns them."""
    found = list(_candidates(words, index))
    for candidate, saved in found:
        words.saved[candidate] += sign * saved * words.counts[index]
        words.places[candidate].add(index)
    return {candidate for candidate, _ in found}


def _put(words: Words, candidate: Candidate, token: str) -> set[Candidate]:
    """Put a new token in its place everywhere. Returns the candidates that were counted again."""
    counted: set[Candidate] = set()
    for index in words.places.pop(candidate):
        symbols, joined, at, hits = words.symbols[index], [], 0, 0
        while at < len(symbols):
            hit = tuple(symbols[at : at + len(candidate)]) == candidate
            joined.append(token if hit else symbols[at])
            at += len(candidate) if hit else 1
            hits += hit
        if hits:
            counted |= _count(words, index, -1)
            words.symbols[index] = joined
            counted |= _count(words, index, 1)
    return {other for other in counted if words.saved[other] > 0}


def _rank(words: Words, candidate: Candidate) -> tuple[int, int, Any, Candidate]:
    """The smallest is taken first: what saves most, then characters, the last of the alphabet first, then pairs."""
    kind = len(candidate)
    return -words.saved[candidate], kind, candidate if kind == 2 else -ord(candidate[0]), candidate


# --------------------------------------------------------------------------- into the tokenizer


def extended(backend: Tokenizer, tokens: list[NewToken]) -> Tokenizer:
    """`backend` with the tokens behind its last id."""
    state = json.loads(backend.to_str())
    first = size(backend)
    if state["model"]["type"] == "BPE":
        _extend_bpe(state, tokens, first)
    else:
        _extend_unigram(state, tokens, first)
    return Tokenizer.from_str(json.dumps(state, ensure_ascii=False))


def size(backend: Tokenizer) -> int:
    """One more than the largest id, those of added tokens included."""
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def unknown_id(backend: Tokenizer) -> Optional[int]:
    """The id of characters that no token has, None where there is no such token."""
    model = json.loads(backend.to_str())["model"]
    return model.get("unk_id") if model["type"] == "Unigram" else backend.token_to_id(model.get("unk_token") or "")


def _extend_bpe(state: dict[str, Any], tokens: list[NewToken], first: int) -> None:
    """Added tokens go into the vocabulary, as GPT-2 has them: `tokenizers` numbers those that aren't there behind all others."""
    model = state["model"]
    model["vocab"] |= {added["content"]: added["id"] for added in state["added_tokens"]}
    for number, token in enumerate(tokens, first):
        model["vocab"][token.text] = number
        if token.pair is not None:
            model["merges"].append(list(token.pair))


def _extend_unigram(state: dict[str, Any], tokens: list[NewToken], first: int) -> None:
    """The place of a piece in the list is its id: added tokens behind the old pieces get places, as unlikely as any."""
    vocab = state["model"]["vocab"]
    scores = {piece: score for piece, score in vocab}
    least = min(scores.values())
    contents = {added["id"]: added["content"] for added in state["added_tokens"]}
    for number in range(len(vocab), first):
        vocab.append([contents.get(number, f"<no token {number}>"), least])
    for token in tokens:
        replaced = sum(scores[part] for part in token.pair) + MARGIN if token.pair else least
        scores[token.text] = max(math.log(token.share), replaced)
        vocab.append([token.text, scores[token.text]])


def made_of(backend: Tokenizer, tokens: list[NewToken]) -> dict[str, list[int]]:
    """New token -> the ids of the old ones that its text was until now; [] for a character that was <unk>."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    parts: dict[str, list[int]] = {}
    for token in tokens:
        if token.pair is not None:
            parts[token.text] = [number for text in token.pair for number in parts.get(text, [vocabulary.get(text)])]
        else:
            names = [f"<0x{byte:02X}>" for byte in token.text.encode()]
            parts[token.text] = [vocabulary[name] for name in names] if all(n in vocabulary for n in names) else []
    return parts
