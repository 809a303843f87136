"""Lightning Fabric, and nothing else of Lightning: the one place that imports it.

`import lightning` brings the Trainer as well, and Fabric asks for the version of torchmetrics by importing it, with matplotlib
where that is installed: two seconds, in each rank, for what no run uses.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _as_if_absent(package: str) -> Iterator[None]:
    """In the body, `package` can't be imported, unless somebody else has imported it already."""
    absent = sys.modules.setdefault(package, None) is None
    try:
        yield
    finally:
        if absent:
            del sys.modules[package]


with _as_if_absent("torchmetrics"):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import (
        ClusterEnvironment,
        LightningEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
    )
    from lightning_fabric.plugins.precision import FSDPPrecision, MixedPrecision, Precision
    from lightning_fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, XLAFSDPStrategy

# Both advise TF32 on each start, which rounds what 32-true says is not rounded: Lightning, and PyTorch's compiler.
logging.getLogger("lightning_fabric.utilities.rank_zero").addFilter(lambda record: "Tensor Cores" not in record.msg)
warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")

__all__ = [
    "ClusterEnvironment",
    "DDPStrategy",
    "FSDPPrecision",
    "FSDPStrategy",
    "Fabric",
    "LightningEnvironment",
    "MixedPrecision",
    "ModelParallelStrategy",
    "Precision",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "XLAFSDPStrategy",
]
