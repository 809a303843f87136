"""Which attention implementations the classes of transformers have, and whether they can be told of
documents in a row."""

import inspect

from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from fabric_llm.model.loading import causal_lm_class


def takes_documents(model_class: type[PreTrainedModel]) -> bool:
    """Whether transformers says that the class takes packed_attention.of_documents.
    capabilities.takes_packed_attention measures whether it uses them."""
    return model_class._supports_flash_attn and model_class._supports_sdpa


def resolve_attention(config: PretrainedConfig, attention: str, kind: str) -> str:
    """transformers' name of the attention implementation for an --attention, on devices of `kind`
    "cpu" or "cuda".

    Raises ValueError where the model hasn't the one that is asked for, or this machine.
    transformers itself would take a kernel from the hub, which is code, for a package that is
    missing.
    """
    model_class = causal_lm_class(config)
    # SDPA has no soft-capping: up to 5.20 transformers leaves it out without a word.
    is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    # Some classes list the kinds of flash attention that they take. None means all of them.
    kinds = model_class._compatible_flash_implementations or ["flash_attention_2"]
    has = {
        "packed": takes_documents(model_class),
        "sdpa": model_class._supports_sdpa and not is_capped,
        "flash_attention_2": model_class._supports_flash_attn and "flash_attention_2" in kinds,
        "flex_attention": model_class._supports_flex_attn,
        "eager": True,
    }
    # The default of transformers, so that what is trained is what its export opens as. Packed
    # attention is chosen later, when the model has been measured (run/reference.py).
    if attention == "auto":
        return "sdpa" if has["sdpa"] else "eager"
    # What was asked for by name isn't replaced by anything else.
    if not has[attention]:
        known = " and ".join(name for name, there in has.items() if there)
        raise ValueError(
            f"--attention {attention}: {model_class.__name__} has {known}; auto takes the best."
        )
    if attention == "flash_attention_2" and not (kind == "cuda" and is_flash_attn_2_available()):
        raise ValueError(
            f"--attention {attention} needs a GPU and the package flash_attn, which aren't both "
            "here."
        )
    if attention == "flex_attention" and kind == "cpu":
        raise ValueError(
            f"--attention {attention} needs a GPU: on a CPU torch has no gradients of it."
        )
    return attention


def takes_positions(model_class: type[PreTrainedModel]) -> bool:
    """False where a model can't be told that positions restart."""
    return "position_ids" in inspect.signature(model_class.forward).parameters
