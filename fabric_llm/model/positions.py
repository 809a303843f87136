"""--rope: other frequencies of rotary positions, for rows that are longer than those that a model
was trained on.

Nothing here imports torch before a model is built.
"""

from copy import deepcopy
from typing import Any, Optional

THETA = "theta"
# Name of a scaling in transformers -> the parameters that it needs besides, as Llama 3.1 has them.
SCALED = {"yarn": {}, "linear": {}, "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}
LARGEST = 1e12  # of the numbers of --rope: larger ones are typing errors
BY_LONGEST = {"dynamic", "longrope"}  # kinds that depend on the longest row that a rank sees


def parse(given: str) -> tuple[str, float]:
    """(kind, number) of --rope, such as ("yarn", 4.0). Raises ValueError."""
    kind, _, number = given.partition(":")
    try:
        value = float(number)
    except ValueError:
        # Refused by the check below.
        value = 0.0
    if kind not in (THETA, *SCALED) or not 1 < value <= LARGEST:
        raise ValueError(
            f"--rope takes theta:THETA, such as theta:8e6, or {', '.join(SCALED)} with a factor "
            f"above 1, such as yarn:4, not {given!r}."
        )
    return kind, value


def length(config: Any) -> Optional[int]:
    """Tokens that a transformers configuration with rotary positions was made for; None if it
    doesn't say."""
    longest, scalings = getattr(config, "max_position_embeddings", None), _scalings(config)
    if not isinstance(longest, int) or not scalings:
        return None
    for scaling in scalings:
        if scaling.get("rope_type") in ("dynamic", "yarn", "longrope"):
            # max_position_embeddings may be the length before the scaling or the one after it.
            before, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
            if before and isinstance(factor, (int, float)):
                longest = max(longest, int(before * factor))
    return longest


def kinds(config: Any) -> set[str]:
    """The kinds of rotary positions of a transformers configuration, such as {"llama3"}."""
    return {scaling["rope_type"] for scaling in _scalings(config) if "rope_type" in scaling}


def _scalings(config: Any) -> list[dict[str, Any]]:
    """The rotary positions of a model, or of each kind of layer; [] where the configuration has
    none."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [one for one in (rope, *rope.values()) if isinstance(one, dict)]


def scaled(config: Any, given: str, context_length: int) -> tuple[Any, str]:
    """(a configuration with the positions of --rope, what has changed in a sentence). Raises
    ValueError.

    context_length: tokens of the longest row. With `theta`, the model is meant for rows of at least
    that length afterwards; with a scaling, for its former length times the factor.
    """
    (kind, value), changed = parse(given), deepcopy(config)
    text, name = changed.get_text_config(), type(config).__name__
    rope = getattr(text, "rope_parameters", None) or {}
    # Setting values in `own` changes `changed`. Where layers differ, those with a window keep their
    # positions, since a window doesn't grow with the row.
    own = rope.get("full_attention", rope) or {}
    trained = getattr(text, "max_position_embeddings", None)
    # Falcon has rotary positions in its configuration that it doesn't use with ALiBi.
    if "rope_theta" not in own or trained is None or getattr(text, "alibi", False):
        raise ValueError(
            f"--rope {given}: a model of {name} has no rotary positions that its configuration "
            "sets."
        )
    before = _in_words(own)
    if kind == THETA:
        own["rope_theta"], made_for = value, max(trained, context_length)
    elif (former := own.get("rope_type", "default")) != "default":
        raise ValueError(
            f"--rope {given}: the positions of this model are scaled already ({former}); take "
            "theta:THETA."
        )
    else:
        made_for = int(trained * value)
        own |= {
            "rope_type": kind,
            "factor": value,
            "original_max_position_embeddings": trained,
            **SCALED[kind],
        }
        # Linear scaling has no such parameter, and transformers warns of those it doesn't know.
        if kind == "linear":
            del own["original_max_position_embeddings"]
    text.max_position_embeddings = made_for
    # Some families don't read these parameters. So what counts is what they compute.
    if _frequencies(changed) == _frequencies(config):
        raise ValueError(
            f"--rope {given}: a model of {name} has the same positions with it as before."
        )
    never = ""
    if made_for > trained:
        never = f"; positions from {trained:,} on were never trained"
    sentence = (
        f"Positions: {before}, for {trained:,} tokens -> {_in_words(own)}, for {made_for:,}{never}."
    )
    return changed, sentence


def _in_words(rope: dict[str, Any]) -> str:
    factor = f", factor {rope['factor']:g}" if "factor" in rope else ""
    return f"{rope.get('rope_type', 'default')}{factor}, theta {rope['rope_theta']:,.12g}"


def _frequencies(config: Any) -> list[list[float]]:
    """The buffers of rotary positions of a model with this configuration."""
    from fabric_llm.model import loading, weights

    skeleton = loading.build_skeleton(config, loading.DTYPES["32-true"])
    weights.compute_buffers(skeleton)
    return [
        buffer.flatten().tolist() for name, buffer in skeleton.named_buffers() if "inv_freq" in name
    ]
