"""AdaComp gradient compression (Chen et al., AAAI 2018).

For PyTorch, see :mod:`adacomp.torch`: one line in a DDP script.

This module works on any buffers: NumPy arrays, memory views, anything that has the buffer protocol, in float32, float16, or
bfloat16 as uint16. A learner compresses its gradients and sends a frame; everybody averages the frames of all::

    import adacomp, numpy as np

    layout = adacomp.Layout([("fc.weight", (100, 50), None), ("fc.bias", (100,), None)])
    learners = [adacomp.Compressor(layout) for _ in range(2)]
    for learner in learners:
        learner.compress({"fc.weight": np.random.randn(100, 50).astype("f"), "fc.bias": np.zeros(100, "f")})
    frames = [learner.encode(number, step=0) for number, learner in enumerate(learners)]
    average = {"fc.weight": np.empty((100, 50), "f"), "fc.bias": np.empty(100, "f")}
    assert adacomp.average(layout, 0, frames, average) is None
    for learner in learners:
        learner.commit()
"""

from ._native import Compressor, Error, Exchange, ExchangeError, Frame, Layout, Learners, average

__all__ = [
    "Compressor",
    "Error",
    "Exchange",
    "ExchangeError",
    "Frame",
    "Layout",
    "Learners",
    "add_to",
    "average",
    "decode",
    "encode",
]


def encode(compressor, learner=0, step=0, codec="rice"):
    """The open step of a compressor as a frame."""
    return compressor.encode(learner, step, codec)


def decode(frame, layout):
    """What a frame says, checked: any bytes give a :class:`Frame` or an :class:`Error`."""
    return Frame(frame, layout)


def add_to(frame, output):
    """Adds what a decoded frame sends to a float32 buffer for each parameter name."""
    frame.add_to(output)
