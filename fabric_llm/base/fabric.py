"""Lightning Fabric, and nothing else of Lightning: the one place that imports it.

`import lightning` brings the Trainer as well, and Fabric asks for the version of torchmetrics by importing it, with matplotlib
where that is installed: two seconds, in each rank, for what no run uses.
"""
# ruff: noqa: F401

import logging
import sys
import warnings

absent = sys.modules.setdefault("torchmetrics", None) is None  # such a module can't be imported
try:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import (
        ClusterEnvironment,
        LightningEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
    )
    from lightning_fabric.plugins.precision import FSDPPrecision, MixedPrecision, Precision
    from lightning_fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, XLAFSDPStrategy
finally:
    if absent:
        del sys.modules["torchmetrics"]

# Both advise TF32 on each start, which rounds what 32-true says is not rounded: Lightning, and PyTorch's compiler.
logging.getLogger("lightning_fabric.utilities.rank_zero").addFilter(lambda record: "Tensor Cores" not in record.msg)
warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
