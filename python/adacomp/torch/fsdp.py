"""The door for FSDP2 and ``replicate()``: what comes in is each unit's gradients, averaged over the processes of a machine.

``fully_shard`` gets the mesh of a machine only. It leaves the machine's average in one flat tensor for each unit, of which this
process has its shards, and calls the hook, which may change the tensor in place. The hook takes a copy, so that the exchange runs
beside the backward pass, and leaves zeros, which FSDP adds to the gradients. When the backward pass is over, all units have been
exchanged and all learners have agreed on the step, the average is added to the gradients.

Names are not handed over with the tensor: FSDP says which parameters are in it when it prepares the reduce-scatter.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from .config import Config
from .node import Inside
from .runtime import Door, Model, Named, Runtime, trained_parameters
from .transport import Transport

WRONG_MESH = (
    "fully_shard has {what}, so it would average between machines itself, uncompressed. Give it the axis inside of a machine: "
    "mesh = init_device_mesh(device, (machines, places), mesh_dim_names=('replicate', 'shard')); "
    "fully_shard(module, mesh=mesh['shard']); attach(model, mesh['replicate'])"
)


class _Unit:
    """A module that FSDP communicates as one."""

    def __init__(self, group: Any, numbers: dict[int, int]) -> None:
        self.group = group
        self.parameters = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
        # By FSDP's own object; and their elements here.
        self.numbers = [numbers[id(each.sharded_param)] for each in self.parameters]
        self.elements = [each.sharded_size.numel() for each in self.parameters]
        # Those in the tensor that comes next, and what came in this step: by position, or nothing.
        self.coming: list[Any] = []
        self.used: list[bool] | None = None
        self.buffer: torch.Tensor | None = None
        self.future: torch.futures.Future[Any] | None = None
        self.divide_by = 1.0

    def take(self, output: torch.Tensor) -> None:
        """Copies what this process has of the gradients, without padding, and leaves zeros."""
        if self.used is not None:
            raise RuntimeError(
                "AdaComp: a unit was reduced twice: the last backward pass broke off, or this one uses the unit "
                "twice, which is not supported"
            )
        if self.buffer is None or self.buffer.dtype != output.dtype:
            self.buffer = torch.zeros(sum(self.elements), dtype=output.dtype, device=output.device)
        given, end = {}, 0
        for each in self.coming:
            start, end = end, end + each.padded_sharded_param_size.numel()
            given[id(each)] = output[start : start + each.sharded_size.numel()]
        if end != output.numel():
            raise RuntimeError(
                f"AdaComp: FSDP's tensor has {output.numel()} elements, expected {end}, in this version of PyTorch"
            )
        self.used = [id(each) in given for each in self.parameters]
        for each, here in zip(self.parameters, self.buffer.split(self.elements)):
            here.copy_(given[id(each)]) if id(each) in given else here.zero_()
        output.zero_()

    def take_nothing(self, dtype: torch.dtype, device: torch.device) -> None:
        """The unit was not used in this step."""
        if self.buffer is None:
            self.buffer = torch.empty(sum(self.elements), dtype=dtype, device=device)
        self.buffer.zero_()
        self.used = [False] * len(self.parameters)

    def used_elsewhere(self) -> list[float]:
        """Returns for each parameter 1 if this process has something of its average, otherwise 0."""
        assert self.buffer is not None
        return [float(part.any()) for part in self.buffer.split(self.elements)]

    def give(self, everywhere: Sequence[float] | None) -> None:
        """Adds the average to the gradients, but not to those of parameters that no learner has used."""
        assert self.buffer is not None and self.used is not None
        used = [here or bool(elsewhere) for here, elsewhere in zip(self.used, everywhere or self.used)]
        for each, used_by_some, average in zip(self.parameters, used, self.buffer.split(self.elements)):
            gradient = each.sharded_param.grad
            if not used_by_some:
                continue
            average = (average / self.divide_by if self.divide_by != 1.0 else average).view(each.sharded_size)
            dtype = each.sharded_param.dtype
            if gradient is None:
                each.sharded_param.grad = each.to_sharded_dtensor(average.to(dtype, copy=True))
            else:
                local = gradient._local_tensor
                local += average.to(local.device, local.dtype)
        self.used = self.future = None


class FsdpDoor(Door):
    """Hands the units of an FSDP2 model to a runtime."""

    def __init__(self, model: torch.nn.Module, learners: dist.ProcessGroup, config: Config, in_place: bool | None = None) -> None:
        if config.node_size != 1:
            raise ValueError("node_size is for DDP: with FSDP2 the mesh of fully_shard says who is inside of a machine")
        self.group = learners
        groups = param_groups(model)
        if not all(hasattr(group, "_prepare_reduce_scatter_inputs") for group in groups):
            raise RuntimeError("this version of PyTorch does not say which parameters FSDP reduces; tested with 2.15")
        for group in (group for group in groups if group._all_reduce_hook is not None):
            if not _is_closed(group._all_reduce_hook):
                raise RuntimeError("the model has an all-reduce hook already, of AdaComp or your own, and FSDP takes one only")
            prepare, group._all_reduce_hook = group._prepare_reduce_scatter_inputs, None
            group._prepare_reduce_scatter_inputs = prepare.__wrapped__
        model_of_all, inside = sharded(model, learners, config)
        # Parameters that nobody has used get no gradient, so they must not send.
        self.runtime = Runtime(model_of_all, learners, config, True, in_place, None, inside, door=FsdpDoor)
        numbers = {id(parameter): number for number, parameter in enumerate(model_of_all.trained)}
        units = [_Unit(group, numbers) for group in groups]
        # About the order of the backward pass. It must be the same on all learners, also if some do not use all units.
        self._units = [unit for unit in reversed(units) if unit.parameters]
        self._open = False
        self._submitted = 0
        # Units that were reduced in this backward pass.
        self._seen: list[_Unit] = []
        # Also those that are frozen: they may be trained later.
        for unit in units:
            self._connect(unit)

    def _connect(self, unit: _Unit) -> None:
        prepare: Callable[..., Any] = unit.group._prepare_reduce_scatter_inputs

        @functools.wraps(prepare)
        def note(parameters: Sequence[Any], *rest: Any) -> Any:
            unit.coming = list(parameters)
            return prepare(parameters, *rest)

        unit.group._prepare_reduce_scatter_inputs = note
        unit.group._all_reduce_hook = functools.partial(self._reduced, unit)

    def _reduced(self, unit: _Unit, output: torch.Tensor) -> None:
        """FSDP's hook: this machine's average of a unit."""
        runtime = self.runtime
        runtime.check()
        if not unit.group.all_reduce_grads:
            raise RuntimeError(
                "AdaComp: accumulate with set_requires_gradient_sync(False), not with set_requires_all_reduce(False)"
            )
        if not set(map(id, unit.coming)) <= set(map(id, unit.parameters)):
            raise RuntimeError("AdaComp: a parameter is trained that was frozen when the hook was attached; attach after that")
        if runtime.is_plain and unit in self._seen:
            # The last backward pass broke off.
            self._open = False
        if not self._open:
            runtime.begin(time.perf_counter())
            self._open, self._submitted, self._seen = True, 0, []
            # After FSDP's own, which is there already and may still reduce units.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._seen.append(unit)
        if runtime.is_plain:
            dist.all_reduce(output.div_(dist.get_world_size(self.group)), group=self.group)
            return
        for each in unit.coming:
            if getattr(each.sharded_param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError("AdaComp: hooks after the accumulation of a gradient would run before it is averaged")
        reduce_group = unit.group._reduce_scatter_process_group if isinstance(unit.group.mesh_info, FSDPMeshInfo) else None
        _, after, _, _ = _get_gradient_divide_factors(
            reduce_group, None, output.dtype, output.device.type, unit.group.gradient_divide_factor,
            unit.group.force_sum_reduction_for_comms,
        )  # fmt: skip
        if runtime.moments and after:
            # Adam is given gradients, and its updates are not divided.
            output.div_(after)
            after = None
        unit.divide_by = after or 1.0
        unit.take(output)
        self._submit_ready()

    def _submit_ready(self) -> None:
        """Submits units that are ready, in the order that all learners have."""
        while self._submitted < len(self._units) and self._units[self._submitted].used is not None:
            unit = self._units[self._submitted]
            assert unit.buffer is not None
            unit.future = self.runtime.submit(unit.buffer, unit.numbers)
            self._submitted += 1

    def _end(self) -> None:
        """The backward pass is over."""
        if not self._open:
            return
        self._open = False
        runtime = self.runtime
        if runtime.is_plain:
            return
        formats = [unit.buffer.dtype for unit in self._units if unit.used is not None and unit.buffer is not None]
        for unit in self._units:
            if unit.used is None:
                unit.take_nothing(formats[0], runtime.device)
        self._submit_ready()
        runtime.finish()
        for unit in self._units:
            assert unit.future is not None
            unit.future.wait()
        with torch.no_grad():
            for unit in self._units:
                everywhere = None
                if not all(unit.used or ()):
                    # All processes of the machine must have a gradient, or none. What they use is the same, so all ask.
                    everywhere = unit.used_elsewhere()
                    everywhere = runtime.inside.combine(everywhere, max) if runtime.inside else everywhere
                unit.give(everywhere)


def _is_closed(hook: Any) -> bool:
    """Tells whether a hook is one of AdaComp that was closed."""
    door = getattr(getattr(hook, "func", None), "__self__", None)
    return isinstance(door, FsdpDoor) and door.runtime.is_closed


def sharded(
    model: torch.nn.Module, learners: dist.ProcessGroup, config: Config, buffers: Named = ()
) -> tuple[Model, Inside | None]:
    """Returns the trained parameters of an FSDP2 model, with whole shapes, and the processes among which they are sharded, if
    there are several. Buffers come after them: every process has them whole, and they travel dense."""
    groups = param_groups(model)
    by_parameter = {id(each.sharded_param): each for group in groups for each in group.fsdp_params}
    trained = trained_parameters(model)
    left = [name for name, parameter in trained if id(parameter) not in by_parameter]
    if left:
        raise ValueError(f"parameter {left[0]} is not sharded, so nobody would average it; call fully_shard on the model, too")
    known = [by_parameter[id(parameter)] for _, parameter in trained]
    wholes = [torch.empty(each._orig_size, device="meta") for each in known] + [buffer for _, buffer in buffers]
    model_of_all = Model(model, [*trained, *buffers], config, wholes, [name for name, _ in buffers])
    shard_group = _machine(groups, learners)
    if shard_group is None or (places := dist.get_world_size(shard_group)) == 1:
        return model_of_all, None
    cut = [_cut(each, places) for each in known] + [[(0, buffer.numel())] * places for _, buffer in buffers]
    transport = Transport(shard_group, model_of_all.device, config.explicit_timeout())
    return model_of_all, Inside(transport, model_of_all.layout, cut)


def param_groups(model: torch.nn.Module) -> list[Any]:
    """Returns FSDP's groups of parameters, in the order of their modules."""
    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if not any(group is other for other in groups):
                    groups.append(group)
    return groups


def _machine(groups: Sequence[Any], learners: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Returns the processes of this machine among which FSDP shards; none where ``replicate()`` has one process a machine."""
    own = set(dist.get_process_group_ranks(learners))
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group in groups:
        info = group.mesh_info
        if isinstance(info, DDPMeshInfo):
            if isinstance(info, FSDPMeshInfo):
                raise ValueError(WRONG_MESH.format(what="a mesh of two dimensions"))
            if info.replicate_mesh_size > 1:
                raise ValueError(
                    "replicate() has a mesh of several processes, so that it averages between them itself; "
                    "give it a mesh of this process alone: replicate(module, mesh=mesh['inside']) of a mesh (learners, 1)"
                )
            continue
        ranks = dist.get_process_group_ranks(info.shard_process_group)
        if set(ranks) & own != {dist.get_rank()}:
            raise ValueError(WRONG_MESH.format(what="processes that are learners"))
        found[tuple(ranks)] = info.shard_process_group
        for each in group.fsdp_params:
            if each.fsdp_placement.dim != 0:
                raise ValueError("a shard_placement_fn with another dimension than 0 is not supported")
    if len(found) > 1:
        raise ValueError("units are sharded among different processes, which is not supported")
    return next(iter(found.values()), None)


def _cut(parameter: Any, places: int) -> list[tuple[int, int]]:
    """Returns which elements of a parameter each place has: whole rows, as `torch.chunk` cuts them."""
    shape = parameter._orig_size
    rows, row = (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)
    each = math.ceil(rows / places)
    return [(min(rows, place * each) * row, min(rows, (place + 1) * each) * row) for place in range(places)]


def fsdp_learners(learners: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Returns the process group of the learners."""
    if learners is None:
        raise TypeError(
            "say between whom to compress: attach(model, mesh['replicate']), the processes that have the same shards on other "
            "machines, with fully_shard(module, mesh=mesh['shard']) inside of a machine"
        )
    return as_group(learners)


def as_group(learners: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """Returns the process group of learners that may be given as a mesh."""
    if isinstance(learners, DeviceMesh):
        if learners.ndim != 1:
            raise ValueError(f"the learners are a mesh of {learners.ndim} dimensions; expected one, such as mesh['replicate']")
        return learners.get_group()
    return learners
