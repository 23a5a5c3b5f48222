"""AdaComp for PyTorch: one line after the model is wrapped by ``DistributedDataParallel`` or FSDP2::

    model = DistributedDataParallel(model)
    hook = adacomp.torch.attach(model)

:class:`LocalSteps` is for learners that are far apart, and exchange once every N steps.

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
