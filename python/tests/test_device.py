"""What the path for other devices asks of them, counted on processor tensors."""

import pytest
import torch
import torch.distributed as dist
from learners import on_learners
from torch.utils._python_dispatch import TorchDispatchMode

from adacomp.research import Exchange, Layout
from adacomp.torch import device
from adacomp.torch.device import Path, SelectionPath
from adacomp.torch.transport import Transport

aten = torch.ops.aten
# Each waits for the device: what it returns depends on values.
WAITING = (aten.nonzero, aten._local_scalar_dense, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2)

# The most operations that a bucket takes, whatever its layers, with those of the transport.
MOST = 60


class Counted(TorchDispatchMode):
    """Counts operations on tensors, those that wait for the device, and the bytes of copies from and to staging memory."""

    def __init__(self, staging):
        super().__init__()
        self.staging, self.operations, self.waits, self.copies, self.bytes = staging, 0, 0, 0, 0

    def is_staging(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.staging

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = function.overloadpacket
        is_view = any(argument.alias_info and not argument.alias_info.is_write for argument in function._schema.arguments)
        self.operations += not is_view
        masked = packet is aten.index and any(index is not None and index.dtype is torch.bool for index in args[1])
        lengths_unknown = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        self.waits += packet in WAITING or masked or lengths_unknown
        if packet is aten.copy_ and self.is_staging(args[0]) != self.is_staging(args[1]):
            self.copies += 1
            self.bytes += args[0].nbytes
        return function(*args, **kwargs)


def paths(strategy, shapes):
    """Returns the native path and the other one, each with an exchange of its own, and the layout."""
    layout = Layout(shapes)
    made = []
    for _ in range(2):
        transport = Transport(dist.group.WORLD, torch.device("cpu"))
        exchange = Exchange(layout, strategy, "rice", transport)
        made.append((transport, exchange))
    (one, native), (other, selecting) = made
    return (one, Path(native)), (other, SelectionPath(selecting, layout, torch.device("cpu"), 2.0, False)), layout


def run(transport, path, buckets):
    transport.begin_step()
    for buffer, layers in buckets:
        path.submit(buffer, layers)
    assert path.finish(buckets) is None


@pytest.mark.parametrize("strategy", ["gather", "reduce", "sharded"])
@pytest.mark.parametrize("layers", [3, 120])
@on_learners(2)
def test_a_step_crosses_twice_a_bucket_with_what_was_selected(strategy, layers):
    shapes = [
        [(f"conv{n}", (40, 10, 5, 5), "conv"), (f"fc{n}", (100, 203), None), (f"b{n}", (9,), None)] for n in range(layers // 3)
    ]
    shapes = [shape for three in shapes for shape in three]
    native, selecting, layout = paths(strategy, shapes)
    order = list(reversed(range(layers)))
    buckets_of = [order[: layers // 2], order[layers // 2 :]]
    generator = torch.Generator().manual_seed(dist.get_rank())
    staging = set()
    original = device.host_buffer

    def host_buffer(words, of):
        buffer = original(words, of)
        staging.add(buffer.untyped_storage().data_ptr())
        # Kept, so that no other tensor gets its address.
        kept.append(buffer)
        return buffer

    kept, device.host_buffer = [], host_buffer
    try:
        for step in range(10):
            gradients = [torch.randn(sum(layout.elements[n] for n in bucket), generator=generator) ** 3 for bucket in buckets_of]
            expected, actual = ([(each.clone(), bucket) for each, bucket in zip(gradients, buckets_of)] for _ in range(2))
            run(*native, expected)
            if step < 9:
                run(*selecting, actual)
            else:
                with Counted(staging) as counted:
                    run(*selecting, actual)
            for (one, _), (other, _) in zip(expected, actual):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32)), step
    finally:
        device.host_buffer = original
    assert counted.operations <= MOST * len(buckets_of), counted.operations
    # One that finds how many are selected, and one copy there and one back.
    assert counted.waits == len(buckets_of)
    assert counted.copies == 2 * len(buckets_of)
    selected = sum(len(selecting[1]._buckets[tuple(bucket)].packed) for bucket in buckets_of)
    averaged = sum(int(buffer.count_nonzero()) for buffer, _ in actual)
    sizes = list(zip(layout.elements, layout.treatments))
    bins = sum(-(-elements // bin) for elements, bin in sizes if isinstance(bin, int))
    dense = sum(elements for elements, bin in sizes if not isinstance(bin, int))
    own = 4 * (selected + averaged + bins) + 2 * 4 * dense
    assert own / 2 < counted.bytes <= 1.3 * own, (counted.bytes, own)
    # Nothing of the size of the gradients is on the processor: the native side writes what it returns element by element.
    assert counted.bytes < sum(buffer.nbytes for buffer, _ in actual) / 3
