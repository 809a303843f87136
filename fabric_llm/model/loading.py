"""Load or initialise a causal language model, and put it on the devices.

Rank 0 reads (or draws) the weights once, on the CPU: the *reference*. All ranks build the same model without
memory: the *skeleton*. `Materializer` then gives each module of the skeleton its memory and the reference's values,
one module at a time, just before the strategy shards that module. So no device ever holds more than one unsharded
layer, host memory holds the weights once, and every strategy starts from the same bits.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, cached_file, is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar  # noqa: F401

from fabric_llm.base import hub, ranks
from fabric_llm.base.faults import BAD_INPUT, NO_CHECKPOINT, REFUSED, Fault, one_line
from fabric_llm.base.files import MANIFEST, check_name
from fabric_llm.model import bounds, packed_attention
from fabric_llm.model.folders import WEIGHT_FILES, check_model_folder, weights_name
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.prepare.tokenizer import load_tokenizer

MOST_PARAMETERS = 10**14  # more is no model but a trap: building it would take for ever
DTYPES = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.float32, "16-mixed": torch.float32, "32-true": torch.float32}


def load_config(model_name: str, attention: Optional[str] = None) -> PretrainedConfig:
    """The model's configuration, with transformers' name of the attention implementation to use (None: its default).

    Raises ValueError where there is none or it isn't a causal LM's.
    """
    check_model_folder(model_name)
    folder = Path(model_name)
    if not folder.is_dir():
        hub.reach()
    try:
        _check_bounds(model_name)
        with bounds.limited():
            config = AutoConfig.from_pretrained(model_name, trust_remote_code=False, attn_implementation=attention)
        # A config.json can name kernels on the hub, which are code, and these names win over the argument above.
        config._attn_implementation, config._experts_implementation = attention, None
    except Fault:
        raise
    except Exception as error:  # transformers and huggingface_hub raise their own
        if "custom code" in str(error):
            sentence = "needs Python code of its own (auto_map), which is never run; use a model transformers has."
            raise Fault(f"{model_name!r} {sentence}", REFUSED) from error
        raise ValueError(_not_a_model(model_name, error)) from error
    for name, value in vars(config).items():
        if callable(getattr(type(config), name, None)) and not callable(value):
            raise ValueError(f"The configuration of {model_name!r} sets {name!r}, which is a method.")
    vars(config).pop("auto_map", None)  # where code is that isn't used: not to be passed on by what is saved
    if (weights := getattr(config, "transformers_weights", None)) is not None:
        weights_name(weights, folder / "config.json")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{model_name!r} is a {config.model_type!r} model, which isn't a causal language model.")
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 <= layers <= bounds.MOST_LAYERS:
        raise ValueError(
            f"The configuration of {model_name!r} declares {layers} layers; at most {bounds.MOST_LAYERS} are read."
        )
    return config


def _check_bounds(model_name: str) -> None:
    """Raises TooMuch where a configuration declares more than anybody could want to read, before it is read."""
    document = _bounded(model_name, CONFIG_NAME) or {}  # AutoConfig says that there is none
    for name in document.get("configuration_files", ()):  # others, for other versions of transformers
        check_name(str(name), Path(model_name, CONFIG_NAME))
        _bounded(model_name, str(name))


def _bounded(model_name: str, file: str) -> Optional[dict[str, Any]]:
    """The JSON of a model's file, None where there is none. Raises TooMuch if it declares too much."""
    found = cached_file(model_name, file)
    if found is None:
        return None
    path = Path(found)
    bounds.check_file(path)
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} isn't JSON: {error}") from error
    bounds.check_document(document)
    return document


def _unreadable(what: str, model_name: str, error: Exception) -> Fault:
    """What is wrong with a part of a model, or of a checkpoint."""
    code = NO_CHECKPOINT if Path(model_name, MANIFEST).is_file() else BAD_INPUT
    said = None if Path(model_name).exists() else hub.answer(model_name, error)
    return Fault(f"{what} of {model_name!r} can't be read: {said or one_line(error)[:400].rstrip('.')}.", code)


def _not_a_model(model_name: str, error: Exception) -> str:
    said = one_line(error)
    if Path(model_name).exists() or isinstance(error, bounds.TooMuch):
        return f"The configuration of {model_name!r} can't be read: {said[:300].rstrip('.')}."
    if said.startswith("Unrecognized model in"):
        said = (
            "on the Hub it has no config.json of a model that transformers knows; it may be an adapter, or GGUF files"
        )
    said = hub.answer(model_name, error) or said[:300].rstrip(".")
    return f"No model {model_name!r}: {said}."


def tokenizer_beside(model_name: str) -> Optional[PreTrainedTokenizerBase]:
    """The tokenizer beside a model or a dataset, None where there is none. Raises Fault for one that is code (77)."""
    folder = Path(model_name)
    if folder.is_dir() and not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        if (folder / CONFIG_NAME).is_file():  # is read as well
            _check_bounds(model_name)
        with suppress(OSError):  # where there is none
            bounds.check_tokenizer(json.loads(Path(cached_file(model_name, "tokenizer_config.json")).read_bytes()))
        with bounds.limited():
            tokenizer = load_tokenizer(model_name)
    except Fault:
        raise
    except Exception as error:  # of a dozen packages
        if (folder / "tokenizer.json").is_file() or isinstance(error, bounds.TooMuch):
            raise _unreadable("The tokenizer", model_name, error) from error
        return None
    tokenizer.init_kwargs.pop("auto_map", None)  # as in load_config
    return tokenizer


def set_generation_config(skeleton: PreTrainedModel, model_name: str) -> None:
    """Give `skeleton` the generation config of the model at `model_name`, if it has one, and one that can be saved again.

    Raises Fault for a file that can't be read.
    """
    try:
        _bounded(model_name, "generation_config.json")
        config = GenerationConfig.from_pretrained(model_name)
    except Exception as error:
        if Path(model_name, "generation_config.json").is_file():
            raise _unreadable("generation_config.json", model_name, error) from error
        if not isinstance(error, OSError):
            raise
        return
    for do_sample in (config.do_sample, True):  # Llama 2: a temperature without do_sample, read but not written
        config.do_sample = do_sample
        with suppress(ValueError):
            config.validate(strict=True)
            skeleton.generation_config = config
            return


def causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """transformers' class of causal models with such a configuration."""
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def resolve_attention(config: PretrainedConfig, attention: str, kind: str) -> str:
    """transformers' name of the attention implementation for an --attention, on devices of `kind` "cpu" or "cuda".

    Raises ValueError where the model hasn't the one that is asked for, or this machine. transformers itself would take a
    kernel from the hub, which is code, for a package that is missing.
    """
    model_class = causal_lm_class(config)
    # SDPA has no soft-capping: up to 5.20 transformers leaves it out without a word.
    is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    has = {
        "packed": packed_attention.fits(model_class),
        "sdpa": model_class._supports_sdpa and not is_capped,
        "flash_attention_2": model_class._supports_flash_attn
        and "flash_attention_2" in (model_class._compatible_flash_implementations or ["flash_attention_2"]),
        "flex_attention": model_class._supports_flex_attn,
        "eager": True,
    }
    if attention == "auto":
        return "sdpa" if has["sdpa"] else "eager"
    if not has[attention]:
        known = " and ".join(name for name, there in has.items() if there)
        raise ValueError(f"--attention {attention}: {model_class.__name__} has {known}; auto takes the best.")
    if attention == "flash_attention_2" and not (kind == "cuda" and is_flash_attn_2_available()):
        raise ValueError(f"--attention {attention} needs a GPU and the package flash_attn, which aren't both here.")
    return attention


def takes_positions(model_class: type[PreTrainedModel]) -> bool:
    """False where a model can't be told that positions restart."""
    return "position_ids" in inspect.signature(model_class.forward).parameters


def has_weights(model_name: str) -> bool:
    """False for a local directory with only a config.json. A sharded checkpoint's are in `weights/`."""
    folder = Path(model_name)
    return not folder.is_dir() or any((folder / name).exists() for name in (*WEIGHT_FILES, "weights"))


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device: names, shapes, dtypes and ties, no memory."""
    with torch.device("meta"):
        return _keep_float32(AutoModelForCausalLM.from_config(config, dtype=dtype)).train()


def _keep_float32(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, made without weights, with the dtypes that `from_pretrained` would give it.

    There, routers and the like stay float32 where their class says so; `from_config` gives them the model's dtype.
    """
    patterns = model._keep_in_fp32_modules_strict
    if not patterns or model.dtype == torch.float32:
        return model
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns))  # as transformers reads them
    saved = model.state_dict()  # what a file can hold: not the buffers that are computed
    for module_name, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                full = f"{module_name}.{name}".lstrip(".")
                if full in saved and tensor.is_floating_point() and kept.search(full):
                    tensor.data = tensor.data.float()
    return model


def checked_skeleton(model_name: str, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """`build_skeleton` of a configuration read from `model_name`. Raises ValueError where it makes no possible model."""
    causal_lm_class(config)  # importing its code may take longer than building a model
    try:
        with bounds.limited():
            skeleton = build_skeleton(config, dtype)
    except Exception as error:  # whatever sizes that nobody thought of lead to
        said = one_line(error)[:300].rstrip(".")
        raise ValueError(f"The configuration of {model_name!r} makes no model here: {said}.") from error
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(
            f"The configuration of {model_name!r} declares {parameters:.1e} parameters; at most {MOST_PARAMETERS:.0e} "
            "are read."
        )
    return skeleton


def load_reference(
    model_name: str, config: PretrainedConfig, dtype: torch.dtype | str, seed: int, state_dict: Optional[dict] = None
) -> PreTrainedModel:
    """The model on the CPU with its weights: given, read, or drawn from `seed`. dtype: or "auto", as they are stored.

    Raises ValueError where the files don't hold exactly the weights of the model: Fault (66) in a checkpoint.
    """
    if state_dict is None and not has_weights(model_name):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _keep_float32(AutoModelForCausalLM.from_config(config, dtype=dtype))
    model_class = causal_lm_class(config)
    source = {"config": config, "dtype": dtype, "output_loading_info": True}
    try:
        if state_dict is not None:
            model, info = model_class.from_pretrained(None, state_dict=state_dict, **source)
        else:
            model, info = model_class.from_pretrained(model_name, use_safetensors=True, **source)
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, ImportError, SafetensorError) as error:
        raise _unreadable("The weights", model_name, error) from error
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:  # transformers fills them with random numbers and a warning
        raise ValueError(
            f"{model_name!r} lacks {len(missing)} of its model's weights or has them in another shape: "
            f"{', '.join(missing[:10])}."
        )
    return model


class Materializer:
    """Gives modules on the meta device memory and the reference's values, the same on all ranks.

    Every rank calls it for the same modules in the same order. `reference` is needed on rank 0 only.
    """

    def __init__(self, model: LanguageModel, reference: Optional[PreTrainedModel], device: torch.device) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.device = device
        self.reference = None if reference is None else dict(LanguageModel(reference).named_modules())
        counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self.tied_ids = {key for key, count in counts.items() if count > 1}
        self.tied: dict[int, nn.Parameter] = {}

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters and buffers that `module` itself holds, not those of its children."""
        for name, meta in module._parameters.items():
            if meta is None or not meta.is_meta:
                continue
            parameter = self.tied.get(id(meta))
            if parameter is None:
                value = self._value(module, name, meta.dtype)
                parameter = nn.Parameter(value, requires_grad=meta.requires_grad)
                if id(meta) in self.tied_ids:
                    self.tied[id(meta)] = parameter
            module._parameters[name] = parameter
        for name, meta in module._buffers.items():
            if meta is not None and meta.is_meta:  # in the reference's dtype: RoPE's frequencies stay float32
                module._buffers[name] = self._value(module, name, dtype=None)

    def _value(self, module: nn.Module, name: str, dtype: Optional[torch.dtype]) -> Tensor:
        """The tensor `name` of `module`, sent from rank 0 to all, on the device."""
        value = None
        if self.reference is not None:
            value = getattr(self.reference[self.names[module]], name).detach().to(device=self.device, dtype=dtype)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            shape = getattr(module, name).shape
            if dtype is None:  # a buffer: the skeleton doesn't know the dtype that the reference gives it
                dtype, shape = ranks.from_first(None if value is None else (value.dtype, value.shape))
            value = torch.empty(shape, dtype=dtype, device=self.device) if value is None else value.contiguous()
            torch.distributed.broadcast(value, src=0)
        return value
