"""From buckets to the native exchange and back: in place where the processor can reach them, otherwise by selections, which torch
operations make on the device by the same rule as the native kernel and to the same bits: float32 additions in the same order,
none of them fused.

A bucket is selected from as a whole, in as many operations however many layers it has. It crosses to the processor in one copy
and back in one: selected elements and bin maxima there, and the elements of the average that are not zero back.
"""

from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray

from .._native import Exchange, Layout

Buckets = Sequence[tuple[torch.Tensor, list[int]]]
Words = NDArray[numpy.int32]

# The dtypes of buckets by the names that the native side has for them.
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def as_array(tensor: torch.Tensor) -> NDArray[numpy.generic]:
    """Returns a processor's tensor as an array, in place; bfloat16, which NumPy does not know, as uint16."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class Path:
    """The way of buckets in the processor's memory: the native kernel works on the buckets themselves."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def set_layout(self, layout: Layout) -> None:
        """Goes on with other bins, and with all residuals."""
        self._exchange.set_layout(layout)

    def set_loss_scale(self, scale: float) -> None:
        self._exchange.set_loss_scale(scale)

    def submit(self, buffer: torch.Tensor, layers: list[int]) -> None:
        self._exchange.submit(as_array(buffer), layers)

    def finish(self, buckets: Buckets) -> int | None:
        """Writes the average into the buckets. Returns None, or a learner whose gradient is not finite."""
        return self._exchange.finish([(as_array(buffer), layers) for buffer, layers in buckets])

    def add_residuals(self, buffer: torch.Tensor, layers: list[int]) -> tuple[bool, bool]:
        """Adds residuals to a bucket's gradients. Returns whether the sums are finite, and whether an unused parameter keeps its
        residual."""
        return self._exchange.add_residuals(as_array(buffer), layers)

    def end_elsewhere(self, arrived: bool) -> None:
        """Ends a step that was sent without the exchange: what has arrived leaves the residuals."""
        self._exchange.end_elsewhere(arrived)

    def decay(self, factor: float) -> None:
        """Multiplies all residuals by a factor."""
        self._exchange.decay(factor)

    def to_host(self) -> None:
        """Copies all residuals to the native side, until `to_device`."""

    def to_device(self) -> None:
        """Takes the residuals back from the native side."""


class SelectionPath(Path):
    """The way of buckets on other devices. Gradients and residuals stay there: what is selected of them goes to the native side,
    and of the average only the elements that are not zero come back."""

    def __init__(
        self, exchange: Exchange, layout: Layout, device: torch.device, soft_threshold: float, skip_unused: bool
    ) -> None:
        super().__init__(exchange)
        self._device, self._skip_unused = device, skip_unused
        self._elements, self._treatments = layout.elements, layout.treatments
        self._extra = soft_threshold - 1.0
        self._factor = 1.0
        self._buckets: dict[tuple[int, ...], DeviceBucket] = {}
        # The residual of each layer: parts of those of the buckets.
        self.residuals: dict[int, torch.Tensor] = {}

    def set_layout(self, layout: Layout) -> None:
        super().set_layout(layout)
        # Buckets are made anew, and take over the residuals.
        self._treatments, self._buckets = layout.treatments, {}

    def set_loss_scale(self, scale: float) -> None:
        super().set_loss_scale(scale)
        self._factor = float(numpy.float32(1.0) / numpy.float32(scale))

    def submit(self, buffer: torch.Tensor, layers: list[int]) -> None:
        bucket = self._bucket(layers)
        maxima, dense = bucket.select(buffer, self._factor, self._extra, self._skip_unused)
        words = bucket.to_host([bucket.packed, maxima.view(torch.int32), _as_words(dense)])
        ends = (bucket.packed.numel(), bucket.packed.numel() + maxima.numel())
        selected, host_maxima, host_dense = words.tensor_split(ends)
        gradients = host_dense.view(buffer.dtype)[: dense.numel()]
        self._exchange.submit_selection(
            layers, as_array(selected), as_array(host_maxima.view(torch.float32)), as_array(gradients)
        )

    def finish(self, buckets: Buckets) -> int | None:
        given = [(layers, NAMES[buffer.dtype]) for buffer, layers in buckets]
        non_finite, averages = self._exchange.finish_selection(given)
        for (buffer, layers), (words, indices, values) in zip(buckets, averages):
            bucket = self._bucket(layers)
            bucket.subtract(bucket.write(buffer, words, indices, values))
        return non_finite

    def add_residuals(self, buffer: torch.Tensor, layers: list[int]) -> tuple[bool, bool]:
        copy = buffer.to("cpu", copy=True)
        result = super().add_residuals(copy, layers)
        buffer.copy_(copy)
        return result

    def decay(self, factor: float) -> None:
        super().decay(factor)
        for residual in self.residuals.values():
            residual.mul_(factor)

    def to_host(self) -> None:
        for layer, residual in self.residuals.items():
            self._exchange.set_residual(layer, residual.cpu().numpy())

    def to_device(self) -> None:
        for layer, treatment in enumerate(self._treatments):
            values = self._exchange.residual(layer) if isinstance(treatment, int) else None
            if values is None:
                continue
            native = torch.from_numpy(values)
            if layer in self.residuals:
                self.residuals[layer].copy_(native)
            elif native.any():
                self.residuals[layer] = native.to(self._device, copy=True)
            self._exchange.set_residual(layer, numpy.zeros(native.numel(), numpy.float32))

    def _bucket(self, layers: list[int]) -> "DeviceBucket":
        """Returns the bucket of these layers, which takes over their residuals if PyTorch has made other buckets."""
        key = tuple(layers)
        if key not in self._buckets:
            self._buckets = {other: bucket for other, bucket in self._buckets.items() if not set(other) & set(key)}
            sizes = [self._elements[layer] for layer in layers]
            bins = [treatment if isinstance(treatment, int) else None for treatment in map(self._treatments.__getitem__, layers)]
            bucket = self._buckets[key] = DeviceBucket(sizes, bins, self._device)
            compressed = [layer for layer, bin in zip(layers, bins) if bin is not None]
            for layer, residual in zip(compressed, bucket.residual.split([self._elements[layer] for layer in compressed])):
                if layer in self.residuals:
                    residual.copy_(self.residuals[layer])
                self.residuals[layer] = residual
        return self._buckets[key]


class DeviceBucket:
    """A bucket on a device: the residual of its compressed layers, one after the other, and what is pending of it."""

    def __init__(self, sizes: Sequence[int], bins: Sequence[int | None], device: torch.device) -> None:
        """Makes one of layers with these elements, and the number of elements of a bin of those that are compressed."""
        self._sizes = sizes
        self._compressed = [position for position, bin in enumerate(bins) if bin is not None]
        self._dense = [position for position, bin in enumerate(bins) if bin is None]
        self._dense_sizes = [sizes[position] for position in self._dense]
        lengths = [(sizes[position], bin) for position, bin in enumerate(bins) if bin is not None]
        self._elements = sum(size for size, _ in lengths)
        of_bins = [numpy.full(-(-size // bin), bin) for size, bin in lengths]
        for (size, bin), of_layer in zip(lengths, of_bins):
            of_layer[-1:] = size - (len(of_layer) - 1) * bin

        def on_device(values: Sequence[int] | NDArray[numpy.int64]) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int64).to(device)

        # Elements of each bin, elements of each layer, and bins of each layer.
        self._bins = on_device(numpy.concatenate(of_bins) if of_bins else [])
        self._layers = on_device([size for size, _ in lengths])
        self._bins_of_layers = on_device([len(of_layer) for of_layer in of_bins])
        self.residual = torch.zeros(self._elements, dtype=torch.float32, device=device)
        # What was selected in the last step: for each element twice its index in the residual, plus one if it is negative.
        self.packed = torch.empty(0, dtype=torch.int32, device=device)
        self._staging = host_buffer(0, device)

    def select(self, buffer: torch.Tensor, factor: float, extra: float, skip_unused: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the gradients of compressed layers, multiplied by a factor, to the residual, and selects.

        Returns bin maxima, with NaN for bins that are not finite, and the gradients of dense layers: both on the device.
        """
        parts = buffer.split(self._sizes)
        dense = _join(parts, self._dense, buffer)
        gradient = _join(parts, self._compressed, buffer).float()
        if factor != 1.0:
            gradient = gradient * factor
        total = self.residual + gradient
        # Its own operation, so that no device fuses it with the addition.
        soft = total + (gradient if extra == 1.0 else gradient * extra)
        # Devices differ in what the maximum of a NaN is, but not of an infinity.
        magnitudes = total.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        maxima = _maxima(magnitudes, self._bins)
        maxima.masked_fill_(maxima.isinf(), torch.nan)
        of_element = maxima.repeat_interleave(self._bins, output_size=self._elements)
        # No comparison with NaN is true, so a bin that is not finite selects nothing and keeps its residual.
        chosen = (soft.abs() >= of_element) & (total != 0)
        keep = of_element.isnan()
        if skip_unused:
            unused = _maxima((gradient != 0).float(), self._layers) == 0
            maxima.masked_fill_(unused.repeat_interleave(self._bins_of_layers, output_size=len(maxima)), 0.0)
            of_unused = unused.repeat_interleave(self._layers, output_size=self._elements)
            chosen &= ~of_unused
            keep |= of_unused
        torch.where(keep, self.residual, total, out=self.residual)
        index = chosen.nonzero().squeeze(1)
        self.packed = (index * 2 + total[index].signbit()).to(torch.int32)
        return maxima, dense

    def write(self, buffer: torch.Tensor, words: Words, indices: int, values: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the average into the bucket, from what :meth:`Exchange.finish_selection` returns. Returns the scale of each
        compressed layer, and how many elements it has sent."""
        counts, layers = (values if values < indices else 0), len(self._compressed)
        lengths = [indices, values, counts, layers, layers]
        index, value, count, scales, sent, dense = self.to_device(words).split([*lengths, len(words) - sum(lengths)])
        value = value.view(torch.float32)
        if counts:
            value = value.repeat_interleave(count, output_size=indices)
        buffer.zero_().index_copy_(0, index.long(), value.to(buffer.dtype))
        if self._dense:
            averages = dense.view(buffer.dtype)[: sum(self._dense_sizes)].split(self._dense_sizes)
            torch._foreach_copy_(_pick(buffer.split(self._sizes), self._dense), list(averages))
        return scales.view(torch.float32), sent

    def subtract(self, sent: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Subtracts what was sent from the residual: of each layer this many elements, as this scale."""
        scale = sent[0].repeat_interleave(sent[1], output_size=len(self.packed))
        self.residual.index_add_(0, self.packed.long() >> 1, torch.where(self.packed & 1 == 1, scale, -scale))

    def to_host(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns words of the device in the processor's memory, where they stay until the next copy."""
        words = torch.cat(list(tensors))
        staging = self._room(len(words)).copy_(words, non_blocking=True)
        if words.is_cuda:
            torch.cuda.current_stream(words.device).synchronize()
        return staging

    def to_device(self, words: Words) -> torch.Tensor:
        """Returns words of the processor on the device."""
        staging = self._room(len(words))
        staging.numpy()[:] = words
        return torch.empty_like(staging, device=self.residual.device).copy_(staging, non_blocking=True)

    def _room(self, words: int) -> torch.Tensor:
        # All copies of a bucket are on one stream, so none overtakes another.
        if len(self._staging) < words:
            self._staging = host_buffer(words + words // 8, self.residual.device)
        return self._staging[:words]


def host_buffer(words: int, device: torch.device) -> torch.Tensor:
    """Returns memory of the processor for copies to and from a device: pinned, if the device has a use for that."""
    return torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")


def _maxima(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns the maximum of each of consecutive segments, without waiting for the device to check their lengths."""
    return torch.segment_reduce(values, "max", lengths=lengths, unsafe=True)


def _pick(parts: Sequence[torch.Tensor], positions: Sequence[int]) -> list[torch.Tensor]:
    return list(map(parts.__getitem__, positions))


def _join(parts: Sequence[torch.Tensor], positions: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(_pick(parts, positions)) if positions else like.new_empty(0)


def _as_words(values: torch.Tensor) -> torch.Tensor:
    """Returns numbers as words of 32 bits; the last may be filled up."""
    if values.element_size() == 2 and len(values) % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values.view(torch.int32)
