"""What a user meant by an unknown flag, value or name: a typo, or the word of another trainer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

SHORT = 5  # letters, of which two that are swapped, as in `lod` for `old`, are a third
LEAST_LIKENESS_OF_SHORT, LEAST_LIKENESS = 0.65, 0.8  # difflib's ratios: a wrong suggestion is worse than none


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The name that `name` is most likely a typo of, in a list; [] if none is near."""
    cutoff = LEAST_LIKENESS_OF_SHORT if len(name) <= SHORT else LEAST_LIKENESS
    return get_close_matches(name, list(known), n=1, cutoff=cutoff)


def flag_instead(name: str, meanings: Mapping[str, str]) -> str:
    """The end of a sentence about the unknown flag `name`. meanings: that end, by each word that a user may have meant."""
    name = name.replace("-", "_").lower()
    same_letter = [word for word in meanings if word[0] == name[:1]]  # the first is hardly ever mistyped
    words = [name, *nearest(name, same_letter)]
    return next((meanings[word] for word in words if word in meanings), "See --help.")


def value_instead(value: str, words: Iterable[Any], kinds: str, instead: Mapping[str, str]) -> str:
    """What to give instead of a value that a flag doesn't take; "" if that isn't known.

    words: those that it takes. kinds: the types that it takes, such as "an integer". instead: what is known of such values,
    by regular expressions in lower case, with {} for the value.
    """
    low = value.lower().strip()
    for pattern, advice in instead.items():
        if re.fullmatch(pattern, low):
            return advice.format(value)
    if low in ("none", "no", "off", "false") and "an integer" in kinds:
        return "leave it out"
    if kinds == "text":  # which 3:5 isn't: in YAML it is the number 185
        return "in a YAML file, write it in quotes"
    if low in ("0", "1") and kinds == "true or false":
        return f"take {'true' if low == '1' else 'false'}"
    by_spelling = {str(word).lower().replace("-", "_"): word for word in words}
    if close := nearest(low.replace("-", "_"), by_spelling):
        return f"take {by_spelling[close[0]]}"
    return _as_number(low, "an integer" in kinds) if "an integer" in kinds or "a number" in kinds else ""


def _as_number(value: str, whole: bool) -> str:
    """`value` without what isn't part of a number, such as a comma or a printed minus sign."""
    plain = value.rstrip(",;").replace(",", "").replace("−", "-").replace("–", "-").strip("'\" ")
    try:
        number = float(plain)
    except ValueError:
        return ""
    if whole:
        return f"take {int(number)}" if number.is_integer() else ""
    return f"take {plain}"
