"""Lightning Fabric, and nothing else of Lightning: the one place that imports it.

`import lightning` also imports the Trainer. Fabric imports torchmetrics to read its version, and
with it matplotlib, if that is installed. Both take two seconds in each rank, and no run uses them.
"""
# ruff: noqa: F401

import logging
import os
import sys
import warnings

absent = sys.modules.setdefault("torchmetrics", None) is None  # such a module can't be imported
try:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import (
        LightningEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
    )
    from lightning_fabric.plugins.precision import FSDPPrecision, MixedPrecision, Precision
    from lightning_fabric.strategies import (
        DDPStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        XLAFSDPStrategy,
    )
finally:
    if absent:
        del sys.modules["torchmetrics"]

# Lightning and PyTorch's compiler advise TF32 at each start, which would round what 32-true
# promises not to. The run says itself on how many devices it trains.
logging.getLogger("lightning_fabric.utilities.rank_zero").setLevel(logging.WARNING)
# A machine that waits for the others says so once, and not by each of its ranks.
logging.getLogger("lightning_fabric.utilities.distributed").addFilter(
    lambda record: os.environ.get("LOCAL_RANK", "0") == "0"
)
warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
