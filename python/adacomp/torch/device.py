"""From buckets to the native exchange and back: in place where the processor can reach them, otherwise by selections, which torch
operations make on the device by the same rule as the native kernel and to the same bits: float32 additions in the same order,
none of them fused.
"""

from collections.abc import Callable, Sequence

import numpy
import torch
from numpy.typing import NDArray

from .._native import Exchange, Layout

Buckets = Sequence[tuple[torch.Tensor, list[int]]]


def as_array(tensor: torch.Tensor) -> NDArray[numpy.generic]:
    """Returns a processor's tensor as an array, in place; bfloat16, which NumPy does not know, as uint16."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class Path:
    """The way of buckets in the processor's memory: the native kernel works on the buckets themselves."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

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

    def to_host(self) -> None:
        """Copies all residuals to the native side, until `to_device`."""

    def to_device(self) -> None:
        """Takes the residuals back from the native side."""


class SelectionPath(Path):
    """The way of buckets on other devices. Gradients stay there: what is selected of them goes to the native side, and of the
    average only the elements that are not zero come back."""

    def __init__(
        self, exchange: Exchange, layout: Layout, device: torch.device, soft_threshold: float, skip_unused: bool
    ) -> None:
        super().__init__(exchange)
        self._device, self._skip_unused = device, skip_unused
        self._elements, self._treatments = layout.elements, layout.treatments
        self._kept = DeviceResiduals(soft_threshold)
        self._loss_scale = 1.0

    def set_loss_scale(self, scale: float) -> None:
        super().set_loss_scale(scale)
        self._loss_scale = scale

    def submit(self, buffer: torch.Tensor, layers: list[int]) -> None:
        self._exchange.begin(layers)
        for layer, part in zip(layers, self._split(buffer, layers)):
            bin = self._treatments[layer]
            if isinstance(bin, int):
                gradient = part.float()
                if self._loss_scale != 1.0:
                    gradient = gradient * float(numpy.float32(1.0) / numpy.float32(self._loss_scale))
                maxima, packed = self._kept.select(layer, gradient, bin, self._skip_unused)
                self._exchange.submit_selection(layer, maxima.cpu().numpy(), packed.cpu().numpy())
            else:
                self._exchange.submit_layer(layer, as_array(part.cpu()))

    def finish(self, buckets: Buckets) -> int | None:
        # In the buckets' own format, so that an average that does not fit it is found.
        averages = [(torch.empty(buffer.shape, dtype=buffer.dtype), layers) for buffer, layers in buckets]
        non_finite = super().finish(averages)
        if non_finite is not None:
            self._kept.rollback()
            return non_finite
        self._kept.commit(self._exchange.scale)
        for (buffer, layers), (averaged, _) in zip(buckets, averages):
            for layer, part, average in zip(layers, self._split(buffer, layers), self._split(averaged, layers)):
                if isinstance(self._treatments[layer], int):
                    index = average.nonzero().squeeze(1)
                    part.zero_()
                    part[index.to(part.device)] = average[index].to(part.device)
                else:
                    part.copy_(average)
        return None

    def add_residuals(self, buffer: torch.Tensor, layers: list[int]) -> tuple[bool, bool]:
        copy = buffer.to("cpu", copy=True)
        result = super().add_residuals(copy, layers)
        buffer.copy_(copy)
        return result

    def to_host(self) -> None:
        for layer, residual in self._kept.residuals.items():
            self._exchange.set_residual(layer, residual.cpu().numpy())

    def to_device(self) -> None:
        for layer, treatment in enumerate(self._treatments):
            values = self._exchange.residual(layer) if isinstance(treatment, int) else None
            if values is None:
                continue
            native = torch.from_numpy(values)
            if layer in self._kept.residuals:
                self._kept.residuals[layer].copy_(native)
            elif native.any():
                self._kept.residuals[layer] = native.to(self._device, copy=True)
            self._exchange.set_residual(layer, numpy.zeros(native.numel(), numpy.float32))

    def _split(self, buffer: torch.Tensor, layers: list[int]) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = buffer.split([self._elements[layer] for layer in layers])
        return parts


class DeviceResiduals:
    """Residuals on a device, and what of them is pending in the step that is going on."""

    def __init__(self, soft_threshold: float) -> None:
        self._extra = soft_threshold - 1.0
        self.residuals: dict[int, torch.Tensor] = {}
        self._pending: dict[int, torch.Tensor] = {}

    def select(self, layer: int, gradient: torch.Tensor, bin: int, skip_unused: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a gradient, flat and float32, and selects.

        Returns bin maxima, with NaN for bins that are not finite, and for each selected element twice its index, plus one if it
        is negative: both on the device.
        """
        residual = self.residuals.get(layer)
        if residual is None:
            residual = self.residuals[layer] = torch.zeros_like(gradient)
        count = -(-residual.numel() // bin)
        if skip_unused and not gradient.any():
            nothing = torch.empty(0, dtype=torch.int32, device=gradient.device)
            self._pending[layer] = nothing
            return torch.zeros(count, dtype=torch.float32, device=gradient.device), nothing
        total = residual + gradient
        # Its own operation, so that no device fuses it with the addition.
        soft = total + (gradient if self._extra == 1.0 else gradient * self._extra)
        padded = torch.nn.functional.pad(total.abs(), (0, -total.numel() % bin))
        maxima = padded.view(-1, bin).amax(1)
        maxima[~maxima.isfinite()] = float("nan")
        of_element = maxima.repeat_interleave(bin)[: residual.numel()]
        # No comparison with NaN is true, so a bin that is not finite selects nothing and keeps its residual.
        chosen = (soft.abs() >= of_element) & (total != 0)
        residual.copy_(torch.where(of_element.isnan(), residual, total))
        index = chosen.nonzero().squeeze(1)
        packed = (index * 2 + total[index].signbit()).to(torch.int32)
        self._pending[layer] = packed
        return maxima, packed

    def commit(self, scale_of: Callable[[int], float]) -> None:
        """Subtracts what was sent from the residuals, as these scales."""
        for layer, packed in self._pending.items():
            residual = self.residuals[layer]
            index = packed.long() >> 1
            sent = torch.full(index.shape, scale_of(layer), dtype=torch.float32, device=residual.device)
            residual[index] -= torch.where(packed & 1 == 1, -sent, sent)
        self._pending.clear()

    def rollback(self) -> None:
        """Leaves what was selected in the residuals."""
        self._pending.clear()
