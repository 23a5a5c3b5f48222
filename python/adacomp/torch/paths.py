"""From buckets to the native exchange and back: in place where the processor can reach them, otherwise by way of selections."""

import numpy
import torch

from .select import DeviceResiduals


def path_for(device, exchange, layout, soft_threshold, skip_unused, in_place=None):
    """The path for buckets on this device. `in_place` has this one taken or the other, whatever the device: for tests."""
    in_place = device.type == "cpu" if in_place is None else in_place
    if in_place:
        return PathInPlace(exchange, skip_unused)
    return PathBySelections(exchange, layout, device, soft_threshold, skip_unused)


def as_array(tensor):
    """A processor's tensor as an array, in place; bfloat16, which NumPy does not know, as uint16."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class PathInPlace:
    """The native kernel works on the buckets themselves."""

    def __init__(self, exchange, skip_unused):
        self._exchange, self._skip_unused = exchange, skip_unused
        exchange.set_skip_unused(skip_unused)

    def set_loss_scale(self, scale):
        self._exchange.set_loss_scale(scale)

    def submit(self, buffer, layers):
        self._exchange.submit(as_array(buffer), layers)

    def finish(self, buckets):
        """None, or a learner whose gradient is not finite."""
        return self._exchange.finish([(as_array(buffer), layers) for buffer, layers in buckets])

    def add_residuals(self, buffer, layers):
        return self._exchange.add_residuals(as_array(buffer), layers, self._skip_unused)

    def end_elsewhere(self, arrived):
        self._exchange.end_elsewhere(arrived)

    def lend(self):
        """Has the native side hold all residuals, until they are taken back."""

    def take(self):
        """Takes them back."""


class PathBySelections:
    """Gradients stay on their device. What is selected of them there goes to the native side, and the average comes back as the
    few elements that it has."""

    def __init__(self, exchange, layout, device, soft_threshold, skip_unused):
        self._exchange, self._place, self._skip_unused = exchange, device, skip_unused
        # For owners, who are native.
        exchange.set_skip_unused(skip_unused)
        self._elements, self._treatments = layout.elements, layout.treatments
        self._device = DeviceResiduals(soft_threshold)
        self._loss_scale = 1.0

    def set_loss_scale(self, scale):
        self._exchange.set_loss_scale(scale)
        self._loss_scale = scale

    def submit(self, buffer, layers):
        self._exchange.begin(layers)
        for layer, part in zip(layers, self._split(buffer, layers)):
            bin = self._treatments[layer]
            if isinstance(bin, int):
                gradient = part.float()
                if self._loss_scale != 1.0:
                    gradient = gradient * float(numpy.float32(1.0) / numpy.float32(self._loss_scale))
                maxima, packed = self._device.select(layer, gradient, bin, self._skip_unused)
                self._exchange.submit_selection(layer, maxima.cpu().numpy(), packed.cpu().numpy())
            else:
                self._exchange.submit_layer(layer, as_array(part.cpu()))

    def finish(self, buckets):
        # In the buckets' own format, so that an average that does not fit it is found.
        averages = [(torch.empty(buffer.shape, dtype=buffer.dtype), layers) for buffer, layers in buckets]
        non_finite = self._exchange.finish([(as_array(average), layers) for average, layers in averages])
        if non_finite is not None:
            self._device.rollback()
            return non_finite
        self._device.commit(self._exchange.scale)
        for (buffer, layers), (whole, _) in zip(buckets, averages):
            for layer, part, average in zip(layers, self._split(buffer, layers), self._split(whole, layers)):
                if isinstance(self._treatments[layer], int):
                    index = average.nonzero().squeeze(1)
                    part.zero_()
                    part[index.to(part.device)] = average[index].to(part.device)
                else:
                    part.copy_(average)
        return None

    def add_residuals(self, buffer, layers):
        copy = buffer.cpu() if buffer.device.type != "cpu" else buffer.clone()
        good, unused = self._exchange.add_residuals(as_array(copy), layers, self._skip_unused)
        buffer.copy_(copy)
        return good, unused

    def end_elsewhere(self, arrived):
        self._exchange.end_elsewhere(arrived)

    def lend(self):
        for layer, residual in self._device.residuals.items():
            self._exchange.set_residual(layer, residual.cpu().numpy())

    def take(self):
        for layer, treatment in enumerate(self._treatments):
            if not isinstance(treatment, int):
                continue
            native = torch.from_numpy(self._exchange.residual(layer))
            if layer in self._device.residuals:
                self._device.residuals[layer].copy_(native)
            elif native.any():
                self._device.residuals[layer] = native.to(self._place, copy=True)
            self._exchange.set_residual(layer, numpy.zeros(native.numel(), numpy.float32))

    def _split(self, buffer, layers):
        return buffer.split([self._elements[layer] for layer in layers])
