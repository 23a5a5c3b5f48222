"""Layouts, compressors, frames and exchanges on any buffers, without PyTorch.

Buffers are NumPy arrays, memory views, or anything else that has the buffer protocol, in float32, float16, or bfloat16 as uint16.
They are in C order, and have their parameter's shape or are flat; anything else is refused (``numpy.ascontiguousarray`` copies).
A learner compresses its gradients and sends a frame; every learner averages the frames of all::

    import numpy as np
    from adacomp.research import Compressor, Layout, average

    layout = Layout([("fc.weight", (100, 50), None), ("fc.bias", (100,), None)])
    learners = [Compressor(layout) for _ in range(2)]
    for learner in learners:
        learner.compress({"fc.weight": np.random.randn(100, 50).astype("f"), "fc.bias": np.zeros(100, "f")})
    frames = [learner.encode(number, step=0) for number, learner in enumerate(learners)]
    output = {"fc.weight": np.empty((100, 50), "f"), "fc.bias": np.empty(100, "f")}
    assert average(layout, 0, frames, output) is None
    for learner in learners:
        learner.commit()

``Frame(data, layout)`` decodes any bytes: it is a checked frame, or an :class:`adacomp.Error`. ``Learners`` is a run of many
learners in one process.
"""

from ._native import Compressor, Exchange, Frame, Layout, Learners, average, kind

__all__ = ["Compressor", "Exchange", "Frame", "Layout", "Learners", "average", "kind"]
