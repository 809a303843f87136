"""Documents that share a 13-gram of words with an evaluation set, which are left out.

The words of a text are what stands between white space, punctuation and symbols, in lower case
after Unicode's NFKC, as in GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix C) and
lm-evaluation-harness, but for apostrophes and the like, which end a word here. In scripts without
spaces (Chinese, Japanese, Thai, Lao, Burmese, Khmer) each character is a word, so 13 of them
are enough there.

An evaluation set is the validation split of a folder that prepare_data.py has written. Its text is
what its tokenizer makes of its tokens: of tasks, each context with each of its choices; of packed
rows, each document. Texts of fewer than 13 words can't be found, and are counted. Nor can words on
both sides of where `best_fit` has cut a long document, or with accents that the tokenizer drops.
Documents are left out of both splits, whatever they are meant for. A tokenizer is trained on all of
them.
"""

import hashlib
import json
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fabric_llm.base.faults import one_line
from fabric_llm.prepare.documents import Part, lines_in, load_splits

GRAM = 13  # words
SHARE = f"{GRAM} words in a row with an evaluation set"
LISTED = "contaminated.jsonl"  # in the dataset: a line for each document and set that share words
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word is lost
WORDS_AT_ONCE = 2**16
TEXTS_AT_ONCE = 1024
# Thai and Lao, Burmese, Khmer, kana, ideographs.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u3096\u30a1-\u30fa\u30fc-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)


@cache
def _word() -> re.Pattern[str]:
    # Combining marks, such as the vowels of Hindi, are part of a word, but not of Python's \w.
    marks = "".join(c for c in map(chr, range(2**16)) if unicodedata.category(c)[0] == "M")
    letter, mark = rf"[^\W_{UNSPACED}]", rf"[{marks}]"
    return re.compile(rf"{letter}+(?:{mark}+{letter}*)*|(?=\w|{mark})[{UNSPACED}]")


def grams(text: str) -> Iterator[tuple[list[str], np.ndarray]]:
    """(words of a part of a text, the hash of the GRAM words that begin with each of them but the
    last, uint64). Nothing for a text without a word."""
    text = unicodedata.normalize("NFKC", text).lower()
    words, held = map(itemgetter(0), _word().finditer(text)), list[str]()
    while some := list(islice(words, WORDS_AT_ONCE)):
        # The last words of the part before, with which those of this part begin.
        held = held[1 - GRAM :] + some
        numbers = np.array([zlib.crc32(word.encode()) for word in held], np.uint64)
        hashes = np.zeros(max(0, len(held) - GRAM + 1), np.uint64)
        # A polynomial of 13 numbers modulo 2**64, for all places at once: Horner's rule.
        for place in range(GRAM):
            hashes = hashes * FACTOR + numbers[place : place + len(hashes)]
        yield held, hashes


class EvaluationSet(NamedTuple):
    """What documents mustn't share."""

    # Of its 13-grams, sorted, and 2**64 - 1 as the last, so that `searchsorted` gives each hash a
    # place in the array. uint64
    hashes: np.ndarray
    # For the manifest: `path`, `sha256` of its manifest, how many `texts` it has, what these `are`,
    # `short` ones, and `documents` that share words with it.
    about: dict[str, Any]

    def save(self, folder: Path) -> str:
        """Write the hashes into the work folder. Returns a hash of them."""
        digest = hashlib.sha256(self.hashes.tobytes()).hexdigest()
        np.save(folder / f"{digest}.npy", self.hashes)
        return digest


def load(folder: str, saved: Sequence[str]) -> list[np.ndarray]:
    """What `save` has written. All processes share its memory."""
    return [np.load(Path(folder, f"{digest}.npy"), mmap_mode="r") for digest in saved]


def shared(text: str, sets: Sequence[np.ndarray]) -> dict[int, str]:
    """{number of an evaluation set: the first words that a text shares with it}"""
    found: dict[int, str] = {}
    for words, hashes in grams(text):
        for number, known in enumerate(sets):
            places = np.searchsorted(known, hashes)
            # One example in each set is enough, and only the first one is named.
            for at in np.flatnonzero(known[places] == hashes)[:1]:
                found.setdefault(number, " ".join(words[at : at + GRAM]))
    return found


def read(name: str) -> EvaluationSet:
    """The evaluation set in a folder. Takes 8 bytes a 13-gram, and a few times that while it reads.

    Raises ValueError for what isn't a dataset of prepare_data.py.
    """
    try:
        manifest = json.loads(Path(name, "manifest.json").read_bytes())
        tokenizer = Tokenizer.from_file(str(Path(name, "tokenizer", "tokenizer.json")))
        about: dict[str, Any] = {"path": name, "sha256": manifest["sha256"]}
        packing, end = manifest.get("packing"), manifest.get("eos_token_id")
        begins = manifest.get("bos_token_id")
        # Texts of tasks are counted as they are read. Rows may have a document in several parts.
        about |= {"documents": 0, "texts": 0, "are": "contexts with a choice", "short": 0}
        if packing is not None:
            about |= {"texts": manifest["splits"]["validation"]["documents"], "are": "documents"}
    except Exception as error:  # tokenizers raises no other
        raise ValueError(
            f"--decontaminate {name}: this isn't a dataset of prepare_data.py: {one_line(error)}"
        ) from error
    # Its tokens would be joined by spaces, so that pieces of words would be words.
    if tokenizer.decoder is None and not isinstance(tokenizer.model, WordLevel):
        raise ValueError(
            f"--decontaminate {name}: its tokenizer has no decoder, so the words aren't known"
        )
    splits = load_splits("dataset", name)
    if "validation" not in splits:
        raise ValueError(f"--decontaminate {name}: this has no split 'validation'")
    documents = _documents(splits["validation"].with_format("numpy"), packing, end)
    hashes = [np.array([2**64 - 1], np.uint64)]
    # Some at a time: tasks have the same context again and again.
    while some := list(islice(documents, TEXTS_AT_ONCE)):
        found = [np.empty(0, np.uint64)]
        for ids in some:
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
            parts = list(grams(text))
            found += [of_part for _, of_part in parts]
            about["texts"] += packing is None
            # Padding has no words, and is no text.
            if parts and (packing != "best_fit" or _is_whole(ids, begins, end)):
                about["short"] += len(parts[0][0]) < GRAM
        hashes.append(np.unique(np.concatenate(found)))
    return EvaluationSet(np.unique(np.concatenate(hashes)), about)


def _is_whole(ids: np.ndarray, begins: Optional[int], end: Optional[int]) -> bool:
    """Whether tokens are a document, and no part of one that best_fit has cut. The last part of one
    shows only where a document begins with a token of its own."""
    return bool(ids[-1] == end and begins in (None, end, ids[0]))


def _documents(rows: Any, packing: Optional[str], end: Optional[int]) -> Iterator[np.ndarray]:
    """The tokens of each document of packed rows, or of each request of tasks. end: the token
    behind a document."""
    held: list[np.ndarray] = []  # of a document that goes on in the next row
    for row in rows:
        ids = row["input_ids"]
        # A request. The padding behind it is no text, as EOS is a special token.
        if "labels" in row:
            yield ids
            continue
        *ended, rest = np.split(ids, np.flatnonzero(ids == end) + 1)
        for document in ended:
            yield np.concatenate([*held, document])
            held.clear()
        held.append(rest)
        # What is left of a document that best_fit cuts may be in any row.
        if packing == "best_fit":
            yield held.pop()
    if held:
        yield np.concatenate(held)


def listing(
    found: Iterable[tuple[Part, int, int, str]],
    sets: Sequence[EvaluationSet],
    given: Callable[[str], str],
) -> Iterator[bytes]:
    """The lines of LISTED. found: what marks of pieces hold, in order. given: the name of a file
    for users. Counts the documents of each set."""
    # A range of a file counts its lines from its own beginning.
    path, byte, lines = "", 0, 0
    for part, number, of, words in found:
        if part.kind == "json_lines":
            if part.path != path:
                path, byte, lines = part.path, 0, 0
            lines += lines_in(path, byte, part.start)
            byte = part.start
            number += lines
        about = sets[of].about
        about["documents"] += 1
        file = given(part.path) + f" [{part.split}]" * bool(part.split)
        line = {"file": file, "number": number, "set": about["path"], "words": words}
        # A name of a file may hold bytes that aren't UTF-8.
        yield json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
