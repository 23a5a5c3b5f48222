"""AdaComp gradient compression (Chen et al., AAAI 2018).

For PyTorch, see :mod:`adacomp.torch`: one line in a DDP script. :mod:`adacomp.research` has what that is made of, for any
buffers.
"""

from importlib.metadata import version

from ._native import Error, ExchangeError

__version__ = version("adacomp")
__all__ = ["Error", "ExchangeError", "__version__"]
