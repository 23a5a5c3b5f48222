"""Several processes that are one learner, such as those of one machine.

Each process has its part of every parameter, by its place. It exchanges that with the processes of the same place on other
machines. Little is left to do inside: the scale of a parameter is that of all its parts, and all processes drop a step together.
For DDP, whose processes all have the whole gradient, :class:`Node` also sums gradients inside, and brings the average to all.
"""

import contextlib
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._native import Layout
from .config import NodeSize
from .transport import Transport

logger = logging.getLogger("adacomp")

# For each parameter the first element and the end of the part of each place.
Cut = Sequence[Sequence[tuple[int, int]]]


class Inside:
    """The processes that together are one learner. Used by one thread at a time, in the same order on all of them."""

    def __init__(self, transport: Transport, model: Layout, cut: Cut) -> None:
        self.transport, self._cut = transport, cut
        self.place, self.places = transport.learner, transport.learners
        # Parameters of which this place has something, and what; these are the layers that it exchanges.
        own = [(number, *ranges[self.place]) for number, ranges in enumerate(cut)]
        self.parts = [(number, start, end) for number, start, end in own if end > start]
        self._layers = {number: layer for layer, (number, _, _) in enumerate(self.parts)}
        self._shared: list[int] = []
        self.count_bins(model)

    def count_bins(self, model: Layout) -> None:
        """Takes over the length of bins from a layout of whole parameters."""
        # Bins of each place, for parameters that have bins at several places.
        self._bins: dict[int, list[int]] = {}
        for number, (ranges, treatment) in enumerate(zip(self._cut, model.treatments)):
            if isinstance(treatment, int) and sum(end > start for start, end in ranges) > 1:
                self._bins[number] = [math.ceil((end - start) / treatment) for start, end in ranges]

    def begin(self, numbers: Sequence[int]) -> list[int]:
        """Begins a bucket of these parameters. Returns the layers that this place has of them."""
        self._shared = [number for number in numbers if number in self._bins]
        return [self._layers[number] for number in numbers if number in self._layers]

    def share_scales(self, layers: list[int], scales: list[float]) -> list[float]:
        """Returns the scales of whole parameters, from those of the parts that this place has of the bucket."""
        if not self._shared:
            return scales
        own = {self.parts[layer][0]: scale for layer, scale in zip(layers, scales)}
        sums = [own.get(number, 0.0) * self._bins[number][self.place] for number in self._shared]
        totals = self.combine(sums, math.fsum)
        whole = {number: total / sum(self._bins[number]) for number, total in zip(self._shared, totals)}
        return [whole.get(self.parts[layer][0], scale) for layer, scale in zip(layers, scales)]

    def agree(self, good: bool) -> bool:
        """Returns whether it is good at all places."""
        return not any(self.combine([float(not good)], max))

    def combine(self, numbers: Sequence[float], combine: Callable[[Sequence[float]], float]) -> list[float]:
        """Returns for each of the numbers the largest, or the sum, of all places."""
        return self.transport.combine(numbers, combine)


class Node(Inside):
    """The same, for processes that all have the whole gradient."""

    def __init__(
        self, transport: Transport, model: Layout, final: Layout, device_group: dist.ProcessGroup | None, differs: bool
    ) -> None:
        """Parameters are cut between the bins that they have in the end. The device's own process group sums gradients that are
        not in the processor's memory. Where places do not differ, their values are the same, and nothing is summed."""
        places = range(transport.learners)
        cut = [[final.shard(number, place, len(places)) for place in places] for number in range(len(final.names))]
        super().__init__(transport, model, cut)
        self._device_group, self._differs = device_group, differs
        # Whether tensors may be in memory that all places have; not if the first attempt fails.
        self._shares = device_group is None
        self._elements = model.elements
        self._plans: dict[tuple[int, ...], _Plan] = {}
        # For what places give each other of a bucket, while the one before may still be read.
        self._scratch = [torch.zeros(0, dtype=torch.uint8)] * 2

    def take(self, buffer: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """Returns this place's part of a bucket: the mean over all places, if they differ."""
        plan = self._plan(buffer, numbers)
        if self._differs:
            self._average(plan, buffer)
        else:
            # The other places have read what was there before.
            self.meet()
            for (start, end), (row, column) in plan.pieces:
                if row == self.place:
                    plan.shard[column : column + end - start] = buffer[start:end]
        return plan.shard[: plan.lengths[self.place]]

    def _average(self, plan: "_Plan", buffer: torch.Tensor) -> None:
        if not plan.shared:
            packed = torch.zeros_like(plan.rows)
            for (start, end), (row, column) in plan.pieces:
                torch.div(buffer[start:end], self.places, out=packed[row, column : column + end - start])
            if self._device_group is not None:
                work = self._device_group._reduce_scatter_base(plan.shard, packed.view(-1), dist.ReduceScatterOptions())
                self.transport.wait(work)
                return
            # Gloo's own reduce-scatter sends as much as an all-reduce.
            received = torch.empty_like(packed)
            self.transport.wait(self.transport.group.alltoall_base(received.view(-1), packed.view(-1), [], []))
            torch.sum(received, 0, out=plan.shard)
            return
        given = self._given(plan)
        for (start, end), (row, column) in plan.pieces:
            if row != self.place:
                torch.div(buffer[start:end], self.places, out=given[self.place, row, column : column + end - start])
        self.meet()
        others = [each[self.place] for place, each in enumerate(given) if place != self.place]
        for (start, end), (row, column) in plan.pieces:
            if row == self.place:
                here = slice(column, column + end - start)
                torch.add(others[0][here], buffer[start:end], alpha=1 / self.places, out=plan.shard[here])
        for other in others[1:]:
            plan.shard += other

    def gather(self, buffer: torch.Tensor, numbers: Sequence[int]) -> None:
        """Writes all places' parts of a bucket, which are where `take` has left them. All places must have met since they were
        averaged."""
        plan = self._plan(buffer, numbers)
        if not plan.shared:
            group = self._device_group or self.transport.group
            self.transport.wait(group._allgather_base(plan.rows.view(-1), plan.shard))
        for (start, end), (row, column) in plan.pieces:
            buffer[start:end] = plan.rows[row, column : column + end - start]

    def _plan(self, buffer: torch.Tensor, numbers: Sequence[int]) -> "_Plan":
        key = tuple(numbers)
        if key not in self._plans:
            # PyTorch may make other buckets of the same parameters.
            self._plans = {other: plan for other, plan in self._plans.items() if not set(other) & set(key)}
            plan = _Plan([self._elements[number] for number in key], [self._cut[number] for number in key])
            shape, size = (self.places, max(plan.lengths)), self.places * max(plan.lengths) * buffer.element_size()
            has_room = self._shares and (not self._differs or self._grow(self.places * size))
            memory = self._share(size) if has_room else None
            plan.shared = memory is not None
            if memory is None:
                if self._shares:
                    logger.warning(
                        "the processes of a machine cannot share memory, so gradients inside of it take longer: /dev/shm is too "
                        "small (Docker: --shm-size), or node_size is more than a machine's processes"
                    )
                self._shares = False
                plan.rows = torch.zeros(shape, dtype=buffer.dtype, device=buffer.device)
                plan.shard = torch.zeros_like(plan.rows[0])
            else:
                plan.rows = memory.view(buffer.dtype).view(shape)
                plan.shard = plan.rows[self.place]
            self._plans[key] = plan
        return self._plans[key]

    def _given(self, plan: "_Plan") -> torch.Tensor:
        """Returns shared memory in which each place has a row for each place. It is used again for the bucket after the next: by
        then all places have met again, so they have read it."""
        self._scratch.reverse()
        return self._scratch[0][: self.places * plan.rows.nbytes].view(plan.rows.dtype).view(self.places, *plan.rows.shape)

    def _grow(self, size: int) -> bool:
        """Makes room for so many bytes of a bucket. Returns whether there is."""
        if self._scratch[0].numel() < size:
            memory = [self._share(size) for _ in self._scratch]
            if memory[0] is None or memory[1] is None:
                return False
            self._scratch = [memory[0], memory[1]]
        return True

    def _share(self, size: int) -> torch.Tensor | None:
        """Returns bytes in memory that all places have, or nothing if there is not enough, or they are on several machines. Its
        file is gone at once, so nothing is left behind."""
        path, memory = "", None
        with contextlib.suppress(OSError):
            if self.place == 0:
                file, path = tempfile.mkstemp(prefix="adacomp-", dir="/dev/shm")
                with open(file, "wb") as opened:
                    os.posix_fallocate(opened.fileno(), 0, max(size, 1))
        own = path
        try:
            path = self.transport.all_gather(path.encode())[0].decode()
            with contextlib.suppress(OSError, ValueError), open(path, "r+b") as opened:
                memory = torch.frombuffer(mmap.mmap(opened.fileno(), max(size, 1)), dtype=torch.uint8)[:size]
            everywhere = self.agree(memory is not None)
        finally:
            if own:
                os.unlink(own)
        return memory if everywhere else None

    def meet(self) -> None:
        """Waits until all places are here, if they share memory."""
        if any(plan.shared for plan in self._plans.values()):
            self.transport.wait(self.transport.group.barrier())


class _Plan:
    """Where the parts of a bucket's parameters go: a row for each place."""

    rows: torch.Tensor
    # This place's row.
    shard: torch.Tensor
    # Whether rows are in memory that all places have.
    shared: bool

    def __init__(self, elements: Sequence[int], cut: Cut) -> None:
        # Where in the bucket, and in which row from which column.
        self.pieces: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.lengths = [0] * len(cut[0])
        first = 0
        for count, ranges in zip(elements, cut):
            for place, (start, end) in enumerate(ranges):
                if end > start:
                    self.pieces.append(((first + start, first + end), (place, self.lengths[place])))
                    self.lengths[place] += end - start
            first += count


def members(group: dist.ProcessGroup, node_size: NodeSize) -> tuple[list[int], list[int]]:
    """Returns the members of a process group that have this process's place on all machines, and those of its own machine, by
    their numbers in the group."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if isinstance(node_size, DeviceMesh):
        if node_size.ndim != 2:
            raise ValueError(
                f"node_size is a mesh of {node_size.ndim} dimensions; expected two: machines, and places in a machine"
            )
        node_size = (node_size.get_group(0), node_size.get_group(1))
    if isinstance(node_size, tuple):
        between, inside = ([dist.get_group_rank(group, each) for each in dist.get_process_group_ranks(one)] for one in node_size)
        if len(between) * len(inside) != size or set(between) & set(inside) != {rank}:
            raise ValueError(
                f"node_size: {len(between)} machines of {len(inside)} processes, but DDP's group has {size} processes"
            )
        return between, inside
    if node_size == "auto":
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise ValueError(
                "node_size='auto' reads LOCAL_WORLD_SIZE, which torchrun sets; pass the number of processes of a machine"
            )
        node_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if size % node_size:
        raise ValueError(f"node_size {node_size}, but DDP's group has {size} processes; expected a divisor")
    machine, place = divmod(rank, node_size)
    return list(range(place, size, node_size)), list(range(machine * node_size, (machine + 1) * node_size))
