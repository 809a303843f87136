"""What files say of a causal language model: its configuration, its tokenizer, and where its
weights are.

All ranks build the same model without memory, the *skeleton*. Its weights come to the devices unit
by unit, see weights.py.
"""

import json
import re
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, Optional, Union
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch.distributed.checkpoint._hf_utils import DTYPE_MAP
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files
from transformers.utils.logging import disable_progress_bar  # noqa: F401  # for our callers

from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.faults import BAD_INPUT, NO_CHECKPOINT, REFUSED, Fault, one_line
from fabric_llm.base.files import MANIFEST, check_name
from fabric_llm.base.names import reach_hub
from fabric_llm.model import folders, weights
from fabric_llm.model.tensor_files import Slice, Tensors, readable
from fabric_llm.model.tokenizer import load_tokenizer

MAX_PARAMETERS = 10**14  # a configuration with more is no model, and takes forever to build
# Functions of torch.nn.init that draw random numbers.
DRAWING = ("kaiming_uniform_", "normal_", "uniform_", "xavier_normal_", "xavier_uniform_")
DTYPES = {
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.float32,
    "16-mixed": torch.float32,
    "32-true": torch.float32,
}


def load_config(model_name: str) -> PretrainedConfig:
    """The model's configuration. Raises ValueError where there is none or it isn't a causal LM's,
    Fault (77) for code."""
    folders.check_model_folder(model_name)
    if not Path(model_name).is_dir():
        reach_hub()
    try:
        # Where there is no config.json, AutoConfig raises a message that says so.
        document = _read_bounded(model_name, CONFIG_NAME) or {}
        # transformers may read one of these instead, each made for other versions of itself.
        for name in document.get("configuration_files", ()):
            check_name(str(name), Path(model_name, CONFIG_NAME))
            _read_bounded(model_name, str(name))
        with folders.limited():
            config = AutoConfig.from_pretrained(model_name, trust_remote_code=False)
        # A config.json can name kernels on the hub, which are code. The attention is chosen later.
        config._attn_implementation = config._experts_implementation = None
    except Fault:
        raise
    except Exception as error:  # transformers and huggingface_hub raise their own
        if "custom code" in str(error):
            sentence = (
                f"{model_name!r} needs Python code of its own, which is never run: use a "
                "model transformers has."
            )
            raise Fault(sentence, REFUSED) from error
        if "does not recognize this architecture" in str(error):
            sentence = (
                f"{model_name!r} is a {document.get('model_type')!r} model, which transformers "
                f"{transformers.__version__} doesn't have: take another model, or another version "
                "of transformers among those that pyproject.toml allows."
            )
            raise Fault(sentence, _code_of(model_name)) from error
        raise _unreadable("The configuration", model_name, error) from error
    # A value in the place of a method would be called by transformers.
    for name, value in vars(config).items():
        if callable(getattr(type(config), name, None)) and not callable(value):
            raise ValueError(
                f"The configuration of {model_name!r} sets {name!r}, which is a method."
            )
    # auto_map names code, which isn't used here, and which an export mustn't name either.
    vars(config).pop("auto_map", None)
    # config.json can name its own file of weights, which could be a pickle or lie elsewhere.
    if (weights := getattr(config, "transformers_weights", None)) is not None:
        folders.weights_name(weights, Path(model_name, CONFIG_NAME))
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"{model_name!r} is a {config.model_type!r} model, which isn't a causal language model."
        )
    return config


def _read_bounded(model_name: str, file: str) -> Optional[Any]:
    """The JSON of a model's file, None where there is none. Raises TooMuch if it declares too
    much."""
    path = cached_file(model_name, file)
    return None if path is None else folders.read_json(Path(path))


def _unreadable(what: str, model_name: str, error: Exception) -> Fault:
    """What is wrong with a part of a model, or of a checkpoint, here or on the hub."""
    is_folder = "/" in model_name or Path(model_name).exists()
    where = "" if is_folder else ", which is no folder here,"
    return Fault(
        f"{what} of {model_name!r}{where} can't be read: {one_line(error)[:2000].rstrip('.')}.",
        _code_of(model_name),
    )


def _code_of(model_name: str) -> int:
    # A folder with a manifest is one of our checkpoints, whose damage has an exit code of its own.
    return NO_CHECKPOINT if Path(model_name, MANIFEST).is_file() else BAD_INPUT


def tokenizer_beside(place: Union[str, Path]) -> Optional[PreTrainedTokenizerBase]:
    """The tokenizer beside a model, which may be a name on the hub, or in a folder, a Path; None
    where there is none.

    Raises Fault for one that is code (77).
    """
    folder, model_name = Path(place), str(place)
    # A Path is a folder of this machine, so it mustn't be looked up on the hub.
    if isinstance(place, Path) and not folder.is_dir():
        return None
    has_file = (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()
    if folder.is_dir() and not has_file:
        return None
    try:
        # transformers reads config.json as well, to find the tokenizer's class.
        if (folder / CONFIG_NAME).is_file():
            folders.read_json(folder / CONFIG_NAME)
        with suppress(OSError):  # where there is none
            file = cached_file(model_name, "tokenizer_config.json")
            document = json.loads(Path(file).read_bytes())
            # T5 and Pegasus make as many tokens as these numbers say, which no list bounds.
            for name in ("extra_ids", "offset"):
                count, most = document.get(name), folders.MAX_ENTRIES
                if isinstance(count, int) and count > most:
                    raise folders.TooMuch(
                        f"it declares {count} tokens ({name}); at most {most} are read"
                    )
        with folders.limited():
            tokenizer = load_tokenizer(model_name)
    except Fault:
        raise
    except Exception as error:  # of a dozen packages
        # A damaged file has to be reported. Otherwise the model has no tokenizer, which is allowed.
        if (folder / "tokenizer.json").is_file() or isinstance(error, folders.TooMuch):
            raise _unreadable("The tokenizer", model_name, error) from error
        return None
    tokenizer.init_kwargs.pop("auto_map", None)  # as in load_config
    return tokenizer


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that a model is to continue, without the EOS that some tokenizers
    append: after it a model would begin another text."""
    encoded = tokenizer(text, return_special_tokens_mask=True)
    tokens, added = encoded["input_ids"], encoded["special_tokens_mask"]
    end = len(tokens)
    # A model needs at least one token to go on from.
    while end > 1 and added[end - 1] and tokens[end - 1] == tokenizer.eos_token_id:
        end -= 1
    return tokens[:end]


def set_generation_config(skeleton: PreTrainedModel, model_name: str) -> None:
    """Give `skeleton` the model's generation config, if it has one that can be saved again. Raises
    Fault."""
    try:
        _read_bounded(model_name, "generation_config.json")
        config = GenerationConfig.from_pretrained(model_name)
    except Exception as error:
        if isinstance(error, OSError) and not Path(model_name, "generation_config.json").is_file():
            return
        raise _unreadable("generation_config.json", model_name, error) from error
    # Llama 2 has a temperature without do_sample, which transformers reads and refuses to write. So
    # it is tried as it is, and then with do_sample. One that fits neither is left out.
    was = config.do_sample
    for do_sample in (was, True):
        config.do_sample = do_sample
        with suppress(ValueError):
            # Raises ValueError for what transformers wouldn't save.
            config.validate(strict=True)
            skeleton.generation_config = config
            if do_sample != was and is_rank_zero():
                print(
                    f"generation_config.json of {model_name!r} has values for sampling without "
                    "do_sample, which transformers doesn't save: with do_sample in what is saved.",
                    flush=True,
                )
            return


def causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """transformers' class of causal models with such a configuration."""
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    # A few configurations have several classes, of which transformers takes the first.
    return model_class[0] if isinstance(model_class, tuple) else model_class


def has_weights(model_name: str) -> bool:
    """False for a local directory with only a config.json. A sharded checkpoint's are in
    `weights/`."""
    folder = Path(model_name)
    return not folder.is_dir() or _is_sharded(folder) or any(folder.glob("*.safetensors*"))


def _is_sharded(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder / "weights").is_dir()


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device: names, shapes, dtypes and ties, no memory."""
    # There is nothing to fill with random numbers, which would take half of the time.
    unfilled: dict[str, Any] = dict.fromkeys(DRAWING, lambda tensor, *args, **more: tensor)
    with torch.device("meta"), patch.multiple(nn.init, **unfilled):
        model = _keep_float32(AutoModelForCausalLM.from_config(config, dtype=dtype), dtype)
    # RWKV divides its own weights in evaluation, until it trains again: a checkpoint would hold
    # them so, and be divided once more where it is opened.
    for module in model.modules():
        if hasattr(module, "_rescale_layers"):
            vars(module)["_rescale_layers"] = lambda: None
    return model.train()


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """`model`, made without weights, with the dtypes that `from_pretrained` would give it for
    `dtype`.

    There, routers and the like stay float32 where their class says so; `from_config` gives them the
    model's dtype.
    """
    patterns = model._get_dtype_plan(dtype)
    # transformers reads the patterns so.
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    saved = model.state_dict()  # what a file can hold: not the buffers that are computed
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False)):
        is_kept = any(pattern.search(name) for pattern in kept)
        if is_kept and name in saved and tensor.is_floating_point():
            # Through `data` the parameter stays the same object, and so tied weights stay tied.
            tensor.data = tensor.data.float()
    return model


def checked_skeleton(
    model_name: str, config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """`build_skeleton` of a configuration read from `model_name`. Raises ValueError where it makes
    no possible model."""
    # Imported before the limit on time begins: that may take longer than building the model.
    causal_lm_class(config)
    try:
        with folders.limited():
            skeleton = build_skeleton(config, dtype)
        parameters = skeleton.num_parameters()
        if parameters > MAX_PARAMETERS:
            raise folders.TooMuch(
                f"it declares {parameters:.1e} parameters; at most {MAX_PARAMETERS:.0e} are read"
            )
    except Exception as error:  # whatever sizes that nobody thought of lead to
        reason = one_line(error)[:300].rstrip(".")
        raise ValueError(
            f"The model of the configuration of {model_name!r} can't be built by transformers: "
            f"{reason}."
        ) from error
    return skeleton


def quantized(config: PretrainedConfig) -> Optional[str]:
    """How a model's weights are quantized, as the end of a sentence, None where they aren't."""
    # The configuration has a dictionary as read, or the object that transformers makes of it.
    if (quantization := getattr(config, "quantization_config", None)) is None:
        return None
    method = type(quantization).__name__
    if isinstance(quantization, dict):
        method = quantization.get("quant_method")
    return f"quantized ({method}), and only weights in 16 or 32 bits are trained"


def open_weights(
    model_name: str, config: PretrainedConfig, dtype: torch.dtype, seed: int = 0
) -> weights.Source:
    """Where the weights of a model, or of a checkpoint, come from, unit by unit: its files, or
    random numbers by `seed`.

    Raises Fault where the files can't be read, or don't hold all weights of the model: 66 for a
    checkpoint, else 2.
    """
    # The source has a skeleton of its own: reading writes into it.
    skeleton = build_skeleton(config, dtype)
    # A checkpoint always has weights: where they are missing it is damaged.
    if not has_weights(model_name) and _code_of(model_name) != NO_CHECKPOINT:
        return weights.Drawn(skeleton, seed)
    with readable(f"The weights of {model_name!r}", _code_of(model_name)):
        if (how := quantized(config)) is not None:
            raise ValueError(f"they are {how}")
        return weights.Stored(skeleton, _slices(model_name, config, skeleton), dtype, model_name)


def stored_dtype(model_name: str, config: PretrainedConfig) -> torch.dtype:
    """The widest dtype in the files of a model, whatever its config.json says, but for what its
    class keeps in float32. Raises ValueError where it has none, Fault as `open_weights`."""
    source = open_weights(model_name, config, torch.float32)
    if not isinstance(source, weights.Stored):
        raise ValueError(f"{model_name!r} has no weights: model.safetensors is missing.")
    dtypes = set()
    for name, tensor in build_skeleton(config, torch.float16).state_dict().items():
        if tensor.dtype == torch.float16:
            dtypes |= {source.slices[key].get_dtype() for key in source.named.get(name, ())}
    return reduce(torch.promote_types, (DTYPE_MAP[dtype] for dtype in dtypes))


def _slices(model_name: str, config: PretrainedConfig, skeleton: PreTrainedModel) -> weights.Slices:
    """Those of a model's safetensors files. Raises ValueError where those of a sharded checkpoint
    hold another model."""
    # A folder for transformers: one file, or several with an index.
    of, code = f"The weights of {model_name!r}", _code_of(model_name)
    if not _is_sharded(Path(model_name)):
        stored = Tensors(weight_files(model_name, config), code, of)
        return {name: Slice(stored, name) for name in stored}
    stored = Tensors(Path(model_name, "weights").glob("*.safetensors"), code, of)
    # A sharded checkpoint has the names of the run that wrote it, and must hold this model whole.
    wanted = {
        weights.PREFIX + name: tuple(one.shape) for name, one in weights.saved(skeleton).items()
    }
    held: dict[str, Any] = dict(stored.shapes)
    for name, shape in stored.shapes.items():
        # The shape is that of the whole tensor, and would look right.
        if stored.missing(name):
            held[name] = f"a part of {shape}"
    for name in sorted(held.keys() | wanted.keys()):
        here, there = held.get(name, "nothing"), wanted.get(name, "nothing")
        if here != there:
            raise ValueError(f"weights hold {here} as {name}, the model {there}")
    return {name.removeprefix(weights.PREFIX): Slice(stored, name) for name in stored}


def weight_files(model_name: str, config: PretrainedConfig) -> list[Path]:
    """What `open_weights` reads of a folder for transformers. Raises FileNotFoundError."""
    named = getattr(config, "transformers_weights", None)
    names = folders.WEIGHT_FILES if named is None else (named,)
    # The first that is there counts, as in transformers: a single file before an index.
    for name in names:
        path = cached_file(model_name, name, _raise_exceptions_for_missing_entries=False)
        if path and path.endswith(".index.json"):
            return [Path(shard) for shard in get_checkpoint_shard_files(model_name, path)[0]]
        if path:
            return [Path(path)]
    raise FileNotFoundError(f"it has no {' and no '.join(names)}")
