"""--float8: the products of layers in 8 bits, by torchao."""

import warnings
from dataclasses import replace
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.model import flops
from fabric_llm.model.weights import repeated_layers


def float8_products(model: PreTrainedModel, recipe: str, is_emulated: bool) -> None:
    """Have torchao make the products of the layers in 8 bits where they are trained, and as plain
    transformers elsewhere.

    So what is evaluated, sampled and compared with an export is the model that is published. Names
    and dtypes of parameters stay. recipe: `tensorwise`, one scale for each tensor; `rowwise`, one
    for each row. is_emulated: without a GPU's products in 8 bits. Raises ValueError where the model
    has no such products. See https://github.com/pytorch/ao/tree/main/torchao/float8.
    """
    float8 = _torchao_float8()
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=is_emulated)
    parts = flops.of_layers(model.config.get_text_config())
    experts = {getattr(part, name, None) for part in parts for name in flops.EXPERTS}
    # The head and the embeddings stay: only layers are made of these products.
    inside = {module for layer in repeated_layers(model).values() for module in layer.modules()}

    def is_product(module: nn.Module, name: str) -> bool:
        """Products of 8 bits have sizes that divide by 16. Routers, which choose experts, stay as
        they are."""
        divides = module.in_features % 16 == module.out_features % 16 == 0
        is_router = module.out_features in experts
        return module in inside and module.weight.dtype == model.dtype and divides and not is_router

    class TrainedInFloat8(float8.float8_linear.Float8Linear):  # type: ignore[name-defined]
        def forward(self, input: Tensor) -> Tensor:
            return (
                super().forward(input)
                if torch.is_grad_enabled()
                else F.linear(input, self.weight, self.bias)
            )

    # It replaces modules of `model` in place.
    float8.convert_to_float8_training(model, config=config, module_filter_fn=is_product)
    products = [
        module
        for module in model.modules()
        if isinstance(module, float8.float8_linear.Float8Linear)
    ]
    # Otherwise the run would train without 8 bits and not say so.
    if not products:
        raise ValueError(
            f"--float8 {recipe}: {type(model).__name__} has no linear layer whose sizes divide by "
            "16."
        )
    # Only `forward` differs, so the class is exchanged, and no parameter is made anew.
    for module in products:
        module.__class__ = TrainedInFloat8


def no_float8(kind: str) -> Optional[str]:
    """Why products can't be made in 8 bits on devices of `kind` "cpu" or "cuda"; None where they
    can. A CPU emulates them."""
    try:
        _torchao_float8()
    except ImportError:
        return "torchao isn't installed: pip install torchao"
    # The first architecture with products in 8 bits is Ada, 8.9.
    if kind == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return (
            "this GPU has no products in 8 bits, as an H100, an L40S or an RTX 4090 and newer "
            "ones have"
        )
    return None


def _torchao_float8() -> Any:
    # Importing torchao may warn of parts that aren't used here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.float8

    return torchao.float8
