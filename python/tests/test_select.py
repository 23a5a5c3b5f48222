"""Selection in torch operations against the native kernel, bit by bit."""

import numpy
import pytest
import torch

from adacomp.research import Compressor, Frame, Layout
from adacomp.torch.device import DeviceResiduals


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [2.0, 1.0, 1.5])
@pytest.mark.parametrize("elements, bin", [(5000, 50), (1003, 500), (999, 1), (3, 500), (16384, 16384)])
def test_the_same_bits_as_the_kernel(elements, bin, factor, default):
    layout = Layout([("w", (elements,), None)], names=[("w", bin)], soft_threshold=factor)
    compressor, device = Compressor(layout), DeviceResiduals(factor)
    generator = numpy.random.default_rng(7)
    torch.set_default_dtype(default)
    try:
        for step in range(12):
            gradient = (generator.standard_normal(elements) ** 3).astype(numpy.float32)
            gradient[generator.random(elements) < 0.1] = 0.0
            if step == 5:
                gradient[generator.integers(elements)] = [numpy.nan, numpy.inf, -numpy.inf][step % 3]
            if step == 7:
                gradient[:] = 0.0
            compressor.compress({"w": gradient})
            maxima, packed = device.select(0, torch.from_numpy(gradient.copy()), bin, False)
            assert maxima.dtype is torch.float32 and packed.dtype is torch.int32
            if compressor.is_finite:
                indices, values = Frame(compressor.encode(), layout).packets()["w"]
                assert numpy.array_equal(packed.numpy() >> 1, indices)
                assert numpy.array_equal(packed.numpy() & 1 == 1, values < 0)
                scale = compressor.statistics()["w"]["scale"]
                compressor.commit()
                device.commit(lambda _, scale=scale: scale)
            else:
                assert maxima.isnan().sum() == 1
                compressor.rollback()
                device.rollback()
            assert numpy.array_equal(device.residuals[0].numpy().view("u4"), compressor.residual("w").view("u4")), step
    finally:
        torch.set_default_dtype(torch.float32)
