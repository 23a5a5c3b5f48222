"""AdaComp for PyTorch's ``DistributedDataParallel``: one line after the model is wrapped::

    model = DistributedDataParallel(model)
    hook = adacomp.torch.attach(model)

The optimiser, the learning rate and all else stay as they are. ``print(hook)`` says whether it compresses, why, and what that
is worth.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("adacomp.torch needs PyTorch: pip install torch") from error

from .config import Config, LocalAdam
from .hook import AdaCompState, adacomp_hook, attach
from .local import LocalSteps, Outer

__all__ = ["AdaCompState", "Config", "LocalAdam", "LocalSteps", "Outer", "adacomp_hook", "attach"]
