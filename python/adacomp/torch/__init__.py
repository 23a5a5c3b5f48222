"""AdaComp for PyTorch's ``DistributedDataParallel``: one line after the model is wrapped::

    model = DistributedDataParallel(model)
    hook = adacomp.torch.attach(model)

The optimiser, the learning rate and everything else stay as they are. ``print(hook)`` says whether it compresses, why, and what
that is worth.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("adacomp.torch needs PyTorch: pip install torch") from error

from .hook import Hook, adacomp_hook, attach
from .moments import LocalAdam

__all__ = ["Hook", "LocalAdam", "adacomp_hook", "attach"]
