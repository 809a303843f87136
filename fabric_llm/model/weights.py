"""The weights of a model, one unit at a time, by the names that they have in memory, as
`from_pretrained` makes them.

A unit is what is read, drawn and sent at once: a layer, or a module outside of layers. One process,
rank 0, has a source: files of Hugging Face, a checkpoint, or random numbers. `sharded.fill` gives
every rank its part of it, whatever the strategy.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from fabric_llm.base.faults import NON_FINITE, Fault
from fabric_llm.base.names import listed

PREFIX = "causal_lm."  # of names in a LanguageModel, before those that transformers knows
# The name of a tensor in the model, the dictionary that holds it, and its key in that dictionary.
Held = tuple[str, dict[str, Any], str]
# Name in the files -> a tensor that is read when it is indexed, as safetensors' get_slice gives it.
Slices = Mapping[str, Any]
NUMBERS = ("F64", "F32", "F16", "BF16")  # dtypes of safetensors that are numbers without a scale


class Source(Protocol):
    """Weights that are there, or are made, when they are asked for."""

    def read(self, unit: str) -> dict[str, Tensor]:
        """The parameters and saved buffers of a unit, on the CPU, by their first names in
        memory."""


class Stored:
    """Weights in files, under the names and in the layout that transformers' conversions of the
    model's class take."""

    def __init__(
        self, skeleton: PreTrainedModel, slices: Slices, dtype: torch.dtype, model_name: str
    ) -> None:
        """skeleton: the model on the meta device, for the source alone. model_name: whose weights
        they are, for messages.

        Raises ValueError, before a tensor is read, where a weight of the model is missing, has
        another shape or isn't stored as numbers, and where the files have tensors that belong
        nowhere, unless transformers ignores them by their names.
        """
        self.skeleton, self.slices, self.first = skeleton, slices, first_names(skeleton)
        self.model_name = model_name
        conversions = get_model_conversion_mapping(skeleton, None, None)
        plan = skeleton._get_dtype_plan(dtype)  # routers and the like that stay float32
        self.how = LoadStateDictConfig(dtype=dtype, dtype_plan=plan, weight_mapping=conversions)
        # Only headers are needed to find what is missing, so a model that doesn't fit fails at
        # once.
        self.named = named = self._names(conversions)
        self.left_out = self._try_without_memory(named)  # names in the files, see above
        self._require_numbers(named)
        self.keys = self._keys_of_units(named)

    def _names(self, conversions: list[Any]) -> dict[str, list[str]]:
        """Name in memory -> the names in the files of what it is made from.

        Raises ValueError for what is there twice.
        """
        # Files may have older names, or one tensor for what the model has as several.
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        expected, prefix = self.skeleton.state_dict(), self.skeleton.base_model_prefix
        named: dict[str, list[str]] = {}
        for key in self.slices:
            name, converted = rename_source_key(key, renamings, converters, prefix, expected)
            # A rule for older names may also fit a name that is right as it is.
            if name not in expected and key in expected:
                name, converted = rename_source_key(key, [], [], prefix, expected)
            # Several tensors may be converted into one. Two that are only renamed would overwrite
            # each other.
            if converted is None and name in named and name in expected:
                raise ValueError(f"{name} is there twice, as {named[name][0]} and as {key}")
            named.setdefault(name, []).append(key)
        return named

    def _keys_of_units(self, named: dict[str, list[str]]) -> dict[str, list[str]]:
        """Unit -> the names in the files of what it is made from."""
        # A unit is read by itself, with all that a conversion of its tensors needs.
        unit_of: dict[str, str] = {}
        for unit, names in units(self.skeleton).items():
            unit_of |= dict.fromkeys(names, unit)
        # The other name of a tied weight -> the name by which it is kept.
        tied = getattr(self.skeleton, "all_tied_weights_keys", {})
        for other, own in tied.items():
            if own in named and other in named:
                self._require_equal(own, other, [*named[own], *named[other]])
        keys_of: dict[str, list[str]] = {}
        for name, keys in named.items():
            unit = unit_of.get(self.first.get(name, name))
            # A weight that the files hold by both of its names is read by its own.
            if unit is not None and tied.get(name) not in named:
                keys_of.setdefault(unit, []).extend(keys)
        return keys_of

    def _require_equal(self, own: str, other: str, keys: list[str]) -> None:
        """Raises ValueError where a weight has two values in the files, which transformers doesn't
        tie then."""
        tensors = [self.slices[key][...] for key in keys]
        if len(tensors) == 2 and not torch.equal(*tensors):
            raise ValueError(
                f"{own} and {other} differ, but config.json ties them: it has to say "
                "tie_word_embeddings false"
            )

    def _require_numbers(self, named: dict[str, list[str]]) -> None:
        """Raises ValueError for integers and numbers of 8 bits, which mean nothing without
        scales."""
        expected = self.skeleton.state_dict()
        # Only what the model keeps as floating point: files may also hold integer buffers.
        taken = []
        for name, keys in named.items():
            if name in expected and expected[name].is_floating_point():
                taken += keys
        if scaled := [key for key in taken if self.slices[key].get_dtype() not in NUMBERS]:
            raise ValueError(
                f"{len(scaled)} of them are {self.slices[scaled[0]].get_dtype()}, such as "
                f"{scaled[0]}, which are numbers only with their scales, and config.json has no "
                "quantization_config that says how: take the model in 16 or 32 bits"
            )

    def _try_without_memory(self, named: dict[str, list[str]]) -> list[str]:
        """The names of tensors in the files that the model doesn't have, and that transformers
        ignores by their names.

        Raises ValueError for what transformers would say of the files, if it read them.
        """
        how = replace(self.how, device_map={"": "meta"})
        # On the meta device transformers' own loading checks names and shapes, and copies nothing.
        slices = {
            key: torch.empty(one.get_shape(), dtype=how.dtype, device="meta")
            for key, one in self.slices.items()
        }
        info, _ = convert_and_load_state_dict_in_model(self.skeleton, slices, how)
        expected = self.skeleton.state_dict()
        # A tied weight is there if it is by any of its names.
        loaded = {self.first.get(name, name) for name in expected.keys() - info.missing_keys}
        info.missing_keys = {
            name for name in info.missing_keys if self.first.get(name, name) not in loaded
        }
        self.drawn = set(info.missing_keys)
        self.skeleton._adjust_missing_and_unexpected_keys(info)
        # What may be missing by its name, such as the routers' biases of A.X K1.
        self.drawn -= info.missing_keys
        # What transformers would only warn of ends the run: a weight drawn at random is no start.
        wrong = [*info.missing_keys, *map(str, info.mismatched_keys), *info.conversion_errors]
        # Of what has no place, transformers ignores some by name, such as older buffers. Other
        # tensors mean that config.json describes another model.
        unused: set[str] = set()
        foreign = []
        for name in named.keys() - expected.keys():
            unused.update(named[name])
            if name in info.unexpected_keys:
                foreign += named[name]
        problems = []
        if wrong:
            missing = f"{len(wrong)} of the model's weights are missing or have another shape"
            problems.append(f"{missing}: {listed(sorted(wrong))}")
        if foreign:
            problems.append(
                f"{len(foreign)} of the tensors in the files have no place in "
                f"{type(self.skeleton).__name__} as config.json describes it, and would be "
                f"dropped: {listed(sorted(foreign))}; correct config.json where it isn't that of "
                "these weights, or take a model that transformers has whole"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return sorted(unused.difference(foreign))

    def read(self, unit: str) -> dict[str, Tensor]:
        """Raises Fault (76) where they hold NaN or infinity."""
        # Loading fills the skeleton's parameters of this unit, from which they are taken again.
        wanted = {key: self.slices[key] for key in self.keys.get(unit, ())}
        convert_and_load_state_dict_in_model(self.skeleton, wanted, self.how)
        tensors, bad = {}, []
        for name, tensor in _taken(self.skeleton).items():
            tensors[self.first.get(name, name)] = tensor
            # Looked at here, where each value passes once: training would spread it silently.
            if tensor.is_floating_point() and not is_finite(tensor):
                bad.append(self.first.get(name, name))
        if bad and all(is_finite(part[...]) for part in wanted.values()):
            dtype = self.skeleton.dtype
            raise Fault(
                f"{dtype} can't hold the numbers of {listed(sorted(bad))} in {self.model_name!r}: "
                "take another dtype.",
                NON_FINITE,
            )
        if bad:
            sentence = f"{self.model_name!r} holds NaN or infinity in {listed(sorted(bad))}."
            raise Fault(sentence, NON_FINITE)
        if self.drawn:
            drawn = Drawn(self.skeleton, seed=0).read(unit)
            tensors |= {name: drawn[name] for name in self.drawn & drawn.keys()}
        return tensors


class Drawn:
    """Random weights, by the model's own `_init_weights`: those of a unit are a function of the
    seed and its name."""

    def __init__(self, skeleton: PreTrainedModel, seed: int) -> None:
        """skeleton: the model on the meta device, for the source alone."""
        self.skeleton, self.seed, self.names = skeleton, seed, units(skeleton)
        self.whole: dict[str, Tensor] = {}

    @torch.no_grad()
    def read(self, unit: str) -> dict[str, Tensor]:
        # NaN shows afterwards what the model's own code hasn't drawn.
        path = unit.split(".") if unit else []
        above = [self.skeleton.get_submodule(".".join(path[:end])) for end in range(len(path) + 1)]
        # The innermost model around the unit knows how its modules are drawn.
        model = next(one for one in reversed(above) if isinstance(one, PreTrainedModel))
        for _, place, name in tensors_of(above[-1]):
            unknown = math.nan if place[name].is_floating_point() else 0
            filled = torch.full_like(place[name], unknown, device="cpu")
            place[name] = _in_place_of(place[name], filled)
        # The seed and the unit's name alone decide, whichever units were drawn before.
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.sha256(f"{self.seed} {unit}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8]))
            above[-1].apply(model._init_weights)
        drawn, names = _taken(self.skeleton), self.names[unit]
        if any(drawn[name].isnan().any() for name in names):
            # A few constructors draw what _init_weights leaves out (Apertus, the first GPT): there
            # the model is drawn as one.
            self.whole = drawn = self.whole or self._drawn_whole()
        return {name: drawn[name] for name in names}

    def _drawn_whole(self) -> dict[str, Tensor]:
        size = sum(parameter.nbytes for parameter in self.skeleton.parameters())
        print(
            f"Some weights of {type(self.skeleton).__name__} are drawn as it is built: rank 0 "
            f"draws the whole model at once, {size / 2**30:.1f} GiB of its memory."
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            drawn = AutoModelForCausalLM.from_config(
                self.skeleton.config, dtype=self.skeleton.dtype
            ).state_dict()
        # Some parameters stay float32 where the model's dtype is another.
        return {
            name: drawn[name].to(tensor.dtype)
            for name, tensor in self.skeleton.state_dict().items()
        }


def is_finite(tensor: Tensor) -> bool:
    """False if a tensor holds NaN or infinity: no checkpoint may. Of a sharded one: a part."""
    # A rank may hold nothing of a small parameter, and aminmax needs an element.
    if not tensor.numel():
        return True
    # Minimum and maximum say it without a copy, which torch.isfinite of the tensor would make.
    return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def saved(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and saved buffers of an unwrapped model, each tied one once, by the first of
    its names."""
    first = first_names(model)
    return {
        name: tensor for name, tensor in model.state_dict().items() if first.get(name, name) == name
    }


def units(model: nn.Module) -> dict[str, list[str]]:
    """Unit -> the names in `saved` of what it holds, in the order of the model."""
    layers, names_of = repeated_layers(model), {}
    for name in saved(model):
        module = name.rpartition(".")[0]
        # A module outside of layers, such as an embedding, is a unit by itself.
        unit = next((layer for layer in layers if name.startswith(f"{layer}.")), module)
        names_of.setdefault(unit, []).append(name)
    return names_of


def first_names(model: nn.Module) -> dict[str, str]:
    """{name of a parameter: the first of its names}. A tied parameter has several names."""
    first: dict[int, str] = {}
    first_of = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_of[name] = first.setdefault(id(parameter), name)
    return first_of


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder layers of a model by name, none of them inside another: of the classes that it
    names itself, else of its longest list."""
    # `_no_split_modules` are the classes that transformers keeps on one device: decoder layers.
    kinds = set()
    for module in model.modules():
        kinds.update(getattr(module, "_no_split_modules", None) or ())
    # The names may be missing, or be those of classes that this model doesn't use.
    if not any(type(module).__name__ in kinds for module in model.modules()):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        kinds = {type(layer).__name__ for layer in max(lists, key=len, default=())}
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # `named_modules` yields outer modules before those in them.
        is_inside = any(name.startswith(f"{outer}.") for outer in layers)
        if type(module).__name__ in kinds and not is_inside:
            layers[name] = module
    return layers


def replacing(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A function that replaces the parameters on the meta device that a module itself holds, by
    parameters with the tensors that `make` makes of them."""
    # By the id of the one on the meta device: a tied one is found there again. Weak, so that what a
    # strategy has sharded isn't kept whole.
    there: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()

    def replace_parameters(module: nn.Module) -> None:
        for key, meta in module._parameters.items():
            if meta is not None and meta.is_meta:
                # A tied parameter that was replaced before, in another module, is taken again.
                parameter = there.get(id(meta))
                if parameter is None:
                    there[id(meta)] = parameter = nn.Parameter(
                        make(meta), requires_grad=meta.requires_grad
                    )
                module._parameters[key] = parameter

    return replace_parameters


def tensors_of(model: nn.Module) -> Iterator[Held]:
    """Every parameter and buffer, as often as modules hold it."""
    for path, module in model.named_modules():
        for place in (module._parameters, module._buffers):
            # Names are listed first, since callers replace tensors in these dictionaries.
            for name in [name for name, tensor in place.items() if tensor is not None]:
                yield f"{path}.{name}".lstrip("."), place, name


@torch.no_grad()
def compute_buffers(model: PreTrainedModel) -> None:
    """Give the buffers of a model on the meta device the values that its own `_init_weights`
    computes, on the CPU."""
    for _, place, name in tensors_of(model):
        if not isinstance(place[name], nn.Parameter):
            place[name] = torch.empty_like(place[name], device="cpu")
    # Parameters are on the meta device still, so nothing is written into them.
    model.initialize_weights()


def _taken(skeleton: nn.Module) -> dict[str, Tensor]:
    """The tensors that have memory, by name. They are taken from the skeleton, which is on the meta
    device afterwards."""
    taken = {}
    for full, place, name in tensors_of(skeleton):
        if not place[name].is_meta:
            taken[full] = place[name].detach()
            place[name] = _in_place_of(place[name], place[name].to("meta"))
    return taken


def _in_place_of(before: Tensor, tensor: Tensor) -> Tensor:
    # A parameter has to stay one, or the module would refuse the tensor in its place.
    if isinstance(before, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=before.requires_grad)
    return tensor
