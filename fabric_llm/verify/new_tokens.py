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
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from tokenizers import Regex, Tokenizer, pre_tokenizers

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


@dataclass
class Words:
    """The words of a corpus as symbols: tokens of the vocabulary, and characters that it lacks."""

    symbols: list[list[str]]
    counts: list[int]
    lacked: set[str]  # characters
    holding: dict[str, list[int]]  # character that is lacked -> words
    pairs: Counter = field(default_factory=Counter)
    places: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))


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
    falls_back = bool(json.loads(backend.to_str())["model"].get("byte_fallback"))
    letters = _lacked_letters(words, falls_back)
    for index in range(len(words.symbols)):
        _count(words, index, 1)
    heap = [(-count, pair) for pair, count in words.pairs.items()]
    heapq.heapify(heap)
    total = sum(count * len(symbols) for symbols, count in zip(words.symbols, words.counts))
    found: list[NewToken] = []
    while len(found) < most:
        pair = _best_pair(heap, words, vocabulary)
        count = words.pairs[pair] if pair else 0
        letter = letters[-1] if letters else (0, "")
        if max(count, letter[0]) < LEAST_COUNT:
            break
        if letter[0] >= count:
            letters.pop()
            found.append(NewToken(letter[1], None, letter[0] / total))
            touched = _add_letter(words, letter[1])
        else:
            found.append(NewToken("".join(pair), pair, count / total))
            touched = _join(words, pair)
        vocabulary.add(found[-1].text)
        for other in touched:
            heapq.heappush(heap, (-words.pairs[other], other))
    return found


def _words(backend: Tokenizer, texts: Iterable[str]) -> Words:
    counts: Counter[str] = Counter()
    of_bytes = is_byte_level(backend)
    for text in texts:
        counts.update(split(backend, text, of_bytes))
    known = {token for token in backend.get_vocab(with_added_tokens=False) if len(token) == 1}
    ordered = sorted(counts)
    symbols = [list(_symbols(backend, word, known)) for word in ordered]
    holding: dict[str, list[int]] = defaultdict(list)
    for index, word in enumerate(ordered):
        for letter in set(word) - known:
            holding[letter].append(index)
    return Words(symbols, [counts[word] for word in ordered], set(holding), holding)


def split(backend: Tokenizer, text: str, of_bytes: bool) -> list[str]:
    """The words of a text, in the letters of the vocabulary: no new token goes beyond one. of_bytes: see `is_byte_level`."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    parts = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    if of_bytes:
        return [word for word, _ in parts]
    inner = pre_tokenizers.Split(WORDS, "isolated")
    return [word for part, _ in parts if part for word, _ in inner.pre_tokenize_str(part)]


def is_byte_level(backend: Tokenizer) -> bool:
    """Whether the letters of the vocabulary are bytes."""
    state = json.loads(backend.to_str())
    return '"ByteLevel"' in json.dumps([state["normalizer"], state["pre_tokenizer"]])


def _symbols(backend: Tokenizer, word: str, known: set[str]) -> Iterator[str]:
    run = ""
    for letter in word:
        if letter in known:
            run += letter
            continue
        yield from (token.value for token in backend.model.tokenize(run)) if run else ()
        yield letter
        run = ""
    yield from (token.value for token in backend.model.tokenize(run)) if run else ()


def _lacked_letters(words: Words, falls_back: bool) -> list[tuple[int, str]]:
    """(tokens that a character would save, character), the best last. A character that becomes <unk> is lost: it counts once."""
    counts: Counter[str] = Counter()
    for symbols, count in zip(words.symbols, words.counts):
        for symbol in symbols:
            if symbol in words.lacked and not symbol.isspace():
                counts[symbol] += count * (len(symbol.encode()) - 1 if falls_back else 1)
    return sorted((count, letter) for letter, count in counts.items())


def _count(words: Words, index: int, sign: int) -> None:
    """Add, or take away, the pairs of a word."""
    symbols = words.symbols[index]
    for pair in zip(symbols, symbols[1:]):
        if pair[0] not in words.lacked and pair[1] not in words.lacked:
            words.pairs[pair] += sign * words.counts[index]
            words.places[pair].add(index)


def _best_pair(
    heap: list[tuple[int, tuple[str, str]]], words: Words, vocabulary: set[str]
) -> Optional[tuple[str, str]]:
    """The most frequent pair that makes a new token. Entries of the heap that are out of date are dropped."""
    while heap:
        count, pair = heap[0]
        text = "".join(pair)
        if -count == words.pairs[pair] and text not in vocabulary and len(text) <= LONGEST_TOKEN:
            return pair
        heapq.heappop(heap)
    return None


def _join(words: Words, pair: tuple[str, str]) -> set[tuple[str, str]]:
    """Put the pair's token in its place everywhere. Returns the pairs whose counts have changed."""
    touched: set[tuple[str, str]] = set()
    for index in sorted(words.places.pop(pair)):
        symbols, joined, at = words.symbols[index], [], 0
        while at < len(symbols):
            hit = tuple(symbols[at : at + 2]) == pair
            joined.append("".join(pair) if hit else symbols[at])
            at += 2 if hit else 1
        if len(joined) == len(symbols):  # of an earlier join
            continue
        touched |= _replace(words, index, joined)
    return touched


def _replace(words: Words, index: int, symbols: list[str]) -> set[tuple[str, str]]:
    before = words.symbols[index]
    _count(words, index, -1)
    words.symbols[index] = symbols
    _count(words, index, 1)
    return {pair for some in (before, symbols) for pair in zip(some, some[1:]) if words.pairs[pair] > 0}


def _add_letter(words: Words, letter: str) -> set[tuple[str, str]]:
    """A character is a token from here on. Returns the pairs whose counts have changed."""
    touched: set[tuple[str, str]] = set()
    for index in words.holding[letter]:
        _count(words, index, -1)
    words.lacked.discard(letter)
    for index in words.holding[letter]:
        _count(words, index, 1)
        touched |= {pair for pair in zip(words.symbols[index], words.symbols[index][1:]) if words.pairs[pair] > 0}
    return touched


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
