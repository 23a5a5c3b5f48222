"""Selection in torch operations against the native kernel, bit by bit."""

import numpy
import pytest
import torch

from adacomp.research import Compressor, Frame, Layout
from adacomp.torch.device import DeviceBucket


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [2.0, 1.0, 1.5])
@pytest.mark.parametrize("elements, bin", [(5000, 50), (1003, 500), (999, 1), (3, 500), (16384, 16384)])
def test_the_same_bits_as_the_kernel(elements, bin, factor, default):
    # A bucket of layers with other bins, and one that is dense.
    sizes = {"w": elements, "bias": 7, "v": 1201}
    layout = Layout([(name, (size,), None) for name, size in sizes.items()], names=[("w", bin), ("v", 50)], soft_threshold=factor)
    torch.set_default_dtype(default)
    try:
        compressor = Compressor(layout)
        device = DeviceBucket(list(sizes.values()), [bin, None, 50], torch.device("cpu"))
        generator = numpy.random.default_rng(7)
        for step in range(12):
            gradients = {name: (generator.standard_normal(size) ** 3).astype(numpy.float32) for name, size in sizes.items()}
            gradient = gradients["w"]
            gradient[generator.random(elements) < 0.1] = 0.0
            if step == 5:
                gradient[generator.integers(elements)] = [numpy.nan, numpy.inf, -numpy.inf][bin % 3]
            if step == 7:
                gradient[:] = 0.0
            compressor.compress(gradients)
            buffer = torch.from_numpy(numpy.concatenate(list(gradients.values())))
            maxima, dense = device.select(buffer, 1.0, factor - 1.0, False)
            assert maxima.dtype is torch.float32 and device.packed.dtype is torch.int32
            assert numpy.array_equal(dense.numpy(), gradients["bias"])
            if compressor.is_finite:
                packets = Frame(compressor.encode(), layout).packets()
                (first, values), (second, others) = packets["w"], packets["v"]
                packed = device.packed.numpy()
                assert numpy.array_equal(packed >> 1, numpy.concatenate([first, second + elements]))
                assert numpy.array_equal(packed & 1 == 1, numpy.concatenate([values, others]) < 0)
                scales = [compressor.statistics()[name]["scale"] for name in ("w", "v")]
                compressor.commit()
                device.subtract((torch.tensor(scales, dtype=torch.float32), torch.tensor([len(first), len(second)])))
            else:
                assert maxima.isnan().sum() == 1
                compressor.rollback()
            residual = numpy.concatenate([compressor.residual("w"), compressor.residual("v")])
            assert numpy.array_equal(device.residual.numpy().view("u4"), residual.view("u4")), step
    finally:
        torch.set_default_dtype(torch.float32)
