"""New tokens for a tokenizer, learned from texts and put behind its last one.

Byte-pair encoding goes on where the tokenizer stopped: the words of the corpus are cut into its own
tokens, and the most frequent pair of neighbours becomes a new token, again and again (Sennrich et
al. 2016, arXiv:1508.07909, from a vocabulary instead of letters; the trainers of `tokenizers` begin
anew). New merges have the last ranks: a text is first cut as before, and only then are tokens
joined. So a text without a new token has the ids that it had, and tokens apply inside of words,
which `add_tokens` would tear apart. A Unigram model, which takes the likeliest cut, gets pieces
with the logarithm of their share of the corpus' tokens, and at least a little more than the cut
that each replaces has, or it would never be taken.
"""

import heapq
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple, Optional

from tokenizers import Regex, Tokenizer, pre_tokenizers

from fabric_llm.data.token_bytes import is_byte_level, unknown_id

LONGEST_TOKEN = 64  # characters; of bytes in byte-level BPE
MIN_COUNT = 2  # a pair that comes once is no word
MARGIN = 1e-3  # nats, of a new piece above what it replaces
# SentencePiece learns from words with the space before them, of one kind of letters, and from
# single digits; the tokenizers that it makes don't split texts at all.
WORDS = Regex(r"▁*[\p{L}\p{M}]+|▁*\p{N}|▁*[^▁\s\p{L}\p{M}\p{N}]+|▁+|\s+")
# what could be a token: a pair of tokens, or one character that no token has
Candidate = tuple[str, ...]


class NewToken(NamedTuple):
    """One token to append."""

    text: str  # as it stands in the vocabulary
    pair: Optional[tuple[str, ...]]  # the two tokens that it is made of; None for a character
    share: float  # of the corpus' tokens before there were new ones: the places where it was joined


def require_extendable(backend: Tokenizer) -> None:
    """Raises ValueError for a tokenizer that can't be extended here."""
    model = json.loads(backend.to_str())["model"]
    if model["type"] not in ("BPE", "Unigram"):
        raise ValueError(
            f"A {model['type']} tokenizer can't be extended: that needs BPE or Unigram."
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ValueError(f"A BPE tokenizer with {name} {model[name]!r} can't be extended.")


def learn(backend: Tokenizer, texts: Iterable[str], most: int) -> list[NewToken]:
    """At most `most` new tokens, those that save most tokens first. The same texts give the same
    tokens."""
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
            words[-1] += (
                [t.value for t in backend.model.tokenize("".join(letters))] if is_known else letters
            )
    total = sum(time * len(symbols) for symbols, time in zip(words, times))
    saved: Counter[Candidate] = Counter()  # tokens of the corpus
    places: dict[Candidate, set[int]] = defaultdict(set)  # words, some of which had it before

    def count(index: int, sign: int) -> set[Candidate]:
        """Add, or take away, what the candidates in a word save. Returns them."""
        symbols = words[index]
        found: set[Candidate] = set()
        for symbol in symbols:
            if symbol not in tokens and not symbol.isspace():
                # As bytes it is several tokens. What is <unk> is lost: it counts once.
                saved[(symbol,)] += (
                    sign * times[index] * (len(symbol.encode()) - 1 if falls_back else 1)
                )
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
        if -number < MIN_COUNT:
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
    """The words of a text, in the letters of the vocabulary: no new token goes beyond one.
    of_bytes: see `is_byte_level`."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    parts = (
        [(text, None)]
        if backend.pre_tokenizer is None
        else backend.pre_tokenizer.pre_tokenize_str(text)
    )
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
        # Added tokens go into the vocabulary, as GPT-2 has them: `tokenizers` numbers those that
        # aren't there behind all others.
        vocab |= {content: number for number, content in added.items()}
        vocab |= {token.text: number for number, token in enumerate(learned, first)}
        model["merges"] += [list(token.pair) for token in learned if token.pair is not None]
    else:
        # The place of a piece in the list is its id: added tokens behind the old pieces get places,
        # as unlikely as any.
        scores = dict(vocab)
        least = min(scores.values())
        vocab += [
            [added.get(number, f"<no token {number}>"), least]
            for number in range(len(vocab), first)
        ]
        for token in learned:
            replaced = sum(scores[part] for part in token.pair) + MARGIN if token.pair else least
            scores[token.text] = max(math.log(token.share), replaced)
            vocab.append([token.text, scores[token.text]])
    return Tokenizer.from_str(json.dumps(state, ensure_ascii=False))


def size(backend: Tokenizer) -> int:
    """One more than the largest id, those of added tokens included."""
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def made_of(backend: Tokenizer, text: str) -> list[int]:
    """The ids of the old tokens that the text of a new one is without it, but for <unk>."""
    unknown = unknown_id(backend)
    return [token.id for token in backend.model.tokenize(text) if token.id != unknown]
