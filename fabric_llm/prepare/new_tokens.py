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
from collections.abc import Iterable, Mapping
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
    of_bytes = is_byte_level(json.loads(backend.to_str()))
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split(backend, text, of_bytes))
    words = Words(backend, counts)
    # Before any join, since `share` is one of the tokens that the corpus has without new ones.
    total = sum(time * len(symbols) for symbols, time in zip(words.symbols, words.times))
    # The smallest is taken first: what saves most, then characters, then pairs.
    heap = [words.rank(candidate) for candidate in words.saved]
    heapq.heapify(heap)
    learned: list[NewToken] = []
    while heap and len(learned) < most:
        rank = heapq.heappop(heap)
        candidate = rank[-1]
        # Entries can't be removed from a heap, so each change of a count has added another.
        if rank != words.rank(candidate) or not words.can_be_token(candidate):
            continue  # its count has changed since, and it is in the heap anew
        saved = words.saved[candidate]
        # No other candidate saves more than this one.
        if saved < MIN_COUNT:
            break
        pair = candidate if len(candidate) == 2 else None
        learned.append(NewToken("".join(candidate), pair, saved / total))
        for other in words.join(candidate):
            if words.saved[other] > 0:
                heapq.heappush(heap, words.rank(other))
    return learned


class Words:
    """The words of a corpus in the tokens that there are, and how many tokens of the corpus each
    candidate would save."""

    def __init__(self, backend: Tokenizer, counts: Mapping[str, int]) -> None:
        self.tokens = set(backend.get_vocab(with_added_tokens=False))  # grows
        self.added = backend.get_vocab(with_added_tokens=True).keys() - self.tokens
        self.falls_back = bool(json.loads(backend.to_str())["model"].get("byte_fallback"))
        self.times = [counts[word] for word in sorted(counts)]
        # Tokens, and characters that no token has.
        self.symbols: list[list[str]] = []
        for word in sorted(counts):
            symbols: list[str] = []
            # A model without byte fallback would make <unk> of letters that it has no token for.
            for is_known, letters in itertools.groupby(word, key=self.tokens.__contains__):
                if is_known:
                    symbols += [token.value for token in backend.model.tokenize("".join(letters))]
                else:
                    symbols += letters
            self.symbols.append(symbols)
        self.saved: Counter[Candidate] = Counter()
        # Words by their number, some of which no longer have the candidate.
        self.places: dict[Candidate, set[int]] = defaultdict(set)
        for index in range(len(self.symbols)):
            self._count(index, 1)

    def rank(self, candidate: Candidate) -> tuple[int, int, Candidate]:
        return (-self.saved[candidate], len(candidate), candidate)

    def can_be_token(self, candidate: Candidate) -> bool:
        text = "".join(candidate)
        if len(candidate) == 1:
            return True
        return len(text) <= LONGEST_TOKEN and text not in self.tokens and text not in self.added

    def join(self, candidate: Candidate) -> set[Candidate]:
        """Make one token of a candidate wherever it stands. Returns the candidates whose counts
        have changed."""
        after = {
            index: joined(self.symbols[index], candidate) for index in self.places.pop(candidate)
        }
        # A character stays one symbol, but can now be part of a pair.
        changed = []
        for index, symbols in after.items():
            if len(candidate) == 1 or len(symbols) < len(self.symbols[index]):
                changed.append(index)
        # Words that change are taken out of the counts, and added again as they are then.
        recounted: set[Candidate] = set()
        for index in changed:
            recounted |= self._count(index, -1)
        # Between the two passes: the first takes away what was counted without the new token.
        self.tokens.add("".join(candidate))
        for index in changed:
            self.symbols[index] = after[index]
            recounted |= self._count(index, 1)
        return recounted

    def _count(self, index: int, sign: int) -> set[Candidate]:
        """Add, or take away, what the candidates in a word save. Returns them."""
        symbols, time = self.symbols[index], sign * self.times[index]
        candidates: set[Candidate] = set()
        for symbol in symbols:
            if symbol not in self.tokens and not symbol.isspace():
                # As bytes it is several tokens. What is <unk> is lost: it counts once.
                tokens = len(symbol.encode()) - 1 if self.falls_back else 1
                self.saved[(symbol,)] += time * tokens
                candidates.add((symbol,))
        for pair in itertools.pairwise(symbols):
            # A merge joins tokens; a character that is none is a candidate by itself.
            if pair[0] in self.tokens and pair[1] in self.tokens:
                self.saved[pair] += time
                candidates.add(pair)
        for candidate in candidates:
            self.places[candidate].add(index)
        return candidates


def split(backend: Tokenizer, text: str, of_bytes: bool) -> list[str]:
    """The words of a text, in the letters of the vocabulary: no new token goes beyond one.
    of_bytes: see `is_byte_level`."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    parts = [(text, None)]
    if backend.pre_tokenizer is not None:
        parts = backend.pre_tokenizer.pre_tokenize_str(text)
    if of_bytes:
        return [word for word, _ in parts]
    inner = pre_tokenizers.Split(WORDS, "isolated")
    words: list[str] = []
    for part, _ in parts:
        if part:
            words += [word for word, _ in inner.pre_tokenize_str(part)]
    return words


def joined(symbols: list[str], candidate: Candidate) -> list[str]:
    """A word in which each place of a candidate is one token."""
    after, at = [], 0
    while at < len(symbols):
        if tuple(symbols[at : at + len(candidate)]) == candidate:
            after.append("".join(candidate))
            at += len(candidate)
        else:
            after.append(symbols[at])
            at += 1
    return after


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
        # A merge that stands behind all others has the last rank.
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
            replaced = least
            if token.pair:
                replaced = sum(scores[part] for part in token.pair) + MARGIN
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
