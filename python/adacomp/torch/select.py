"""AdaComp's selection in torch operations, for tensors that are not in the processor's memory.

The same rule as the native kernel's, and the same bits: float32 additions in the same order, none of them fused.
"""

import torch


class DeviceResiduals:
    """Residuals on a device, and what of them is pending in the step that is going on."""

    def __init__(self, soft_threshold):
        self._extra = soft_threshold - 1.0
        self.residuals = {}
        self._pending = {}

    def select(self, layer, gradient, bin, skip_unused):
        """Adds a gradient, flat and float32, and selects.

        Bin maxima, with NaN for bins that are not finite, and for each selected element twice its index, plus one if it is
        negative: both on the device.
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
        maxima = _in_bins(total.abs(), bin).amax(1)
        maxima[~maxima.isfinite()] = float("nan")
        of_element = maxima.repeat_interleave(bin)[: residual.numel()]
        # No comparison with NaN is true, so a bin that is not finite selects nothing and keeps its residual.
        chosen = (soft.abs() >= of_element) & (total != 0)
        residual.copy_(torch.where(of_element.isnan(), residual, total))
        index = chosen.nonzero().squeeze(1)
        packed = (index * 2 + total[index].signbit()).to(torch.int32)
        self._pending[layer] = packed
        return maxima, packed

    def commit(self, scale_of):
        """What was sent leaves the residuals, as these scales."""
        for layer, packed in self._pending.items():
            residual = self.residuals[layer]
            index = packed.long() >> 1
            sent = torch.full(index.shape, scale_of(layer), dtype=torch.float32, device=residual.device)
            residual[index] -= torch.where(packed & 1 == 1, -sent, sent)
        self._pending.clear()

    def rollback(self):
        """What was selected stays in the residuals."""
        self._pending.clear()


def _in_bins(values, bin):
    """Rows of one bin each, the last filled with zeros."""
    missing = -values.numel() % bin
    return torch.nn.functional.pad(values, (0, missing)).view(-1, bin)
