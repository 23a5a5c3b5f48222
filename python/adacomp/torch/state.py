"""What a hook keeps, to and from dicts of tensors."""

import torch

TEXT = "adacomp"
RESIDUAL, OWNER = "residual.", "owner."
# Those of `local_adam`: how many steps they are of, and both by parameter.
STEPS, MOMENTS = "adam.steps", ("adam.first.", "adam.second.")


def save(engine, consolidate):
    engine.path.lend()
    try:
        residuals, owner, text = _consolidated(engine) if consolidate else engine.exchange.save()
    finally:
        engine.path.take()
    saved = {TEXT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}
    for name, parameter in zip(engine.layout.names, engine.parameters):
        if name in residuals:
            saved[RESIDUAL + name] = _shaped(torch.from_numpy(residuals[name]).reshape(-1), parameter)
    # Shares of parameters are flat.
    saved.update({OWNER + name: torch.from_numpy(values) for name, values in owner.items()})
    if engine.moments:
        saved.update(_save_moments(engine, consolidate))
    return saved


def load(engine, states):
    parameters = dict(zip(engine.layout.names, engine.parameters))
    if any(STEPS in state for state in states) and not engine.moments:
        raise ValueError("the state has Adam's moments: attach with local_adam=adacomp.torch.LocalAdam()")
    engine.exchange.load([_read(state, parameters) for state in states])
    engine.path.take()
    if engine.moments:
        _load_moments(engine, [state for state in states if STEPS in state])


def _save_moments(engine, consolidate):
    saved = {STEPS: torch.tensor(engine.moments.steps)}
    for number, (name, parameter) in enumerate(zip(engine.layout.names, engine.parameters)):
        kept = engine.moments.kept.get(number)
        if kept is None and not consolidate:
            continue
        for key, moment in zip(MOMENTS, kept or [torch.zeros(parameter.numel(), device=parameter.device)] * 2):
            moment = moment.cpu() if moment.device.type != "cpu" else moment.clone()
            if consolidate:
                engine.collective.wait(engine.collective.start_sum(moment))
                moment /= engine.learners
            saved[key + name] = _shaped(moment, parameter)
    return saved


def _load_moments(engine, states):
    """This learner's own, or where there is another number of learners, the average of all."""
    if len(states) == engine.learners:
        states = [states[engine.collective.learner]]
    engine.moments.steps = max((int(state[STEPS]) for state in states), default=0)
    engine.moments.kept.clear()
    for number, (name, parameter) in enumerate(zip(engine.layout.names, engine.parameters)):
        have = [state for state in states if MOMENTS[0] + name in state]
        if have:
            averages = (sum(_flat(state[key + name].cpu(), parameter) for state in have) / len(states) for key in MOMENTS)
            engine.moments.kept[number] = tuple(average.to(parameter.device, torch.float32) for average in averages)


def _read(state, parameters):
    if TEXT not in state:
        raise ValueError(f"not a state of an AdaComp hook: it has no {TEXT!r}")
    residuals, owner = {}, {}
    for key, values in state.items():
        values = values.detach().cpu()
        if key.startswith(RESIDUAL):
            name = key.removeprefix(RESIDUAL)
            parameter = parameters.get(name)
            flat = values if parameter is None or parameter.shape != values.shape else _flat(values, parameter)
            residuals[name] = flat.contiguous().numpy().reshape(tuple(values.shape))
        elif key.startswith(OWNER):
            owner[key.removeprefix(OWNER)] = values.contiguous().numpy()
    return residuals, owner, bytes(state[TEXT].tolist()).decode(errors="replace")


def _consolidated(engine):
    """The average over learners of all that they keep, as the state of one learner alone."""
    tag = f"consolidate {engine.exchange.step}".encode()
    if any(other != tag for other in engine.collective.to_all(tag)):
        raise RuntimeError("state_dict(consolidate=True) must be called by all learners, after the same step")
    residuals = {}
    for number, name in enumerate(engine.layout.names):
        values = engine.exchange.kept(number)
        if values is None:
            continue
        total = torch.from_numpy(values)
        engine.collective.wait(engine.collective.start_sum(total))
        shape = tuple(engine.parameters[number].shape)
        residuals[name] = (total / engine.learners).numpy().reshape(shape)
    return residuals, {}, engine.exchange.saved_by(0, 1)


def _shaped(flat, parameter):
    """Values in the order in which a parameter is stored, with its shape."""
    if _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride()).contiguous()
    return flat.view(parameter.shape)


def _flat(values, parameter):
    """The reverse."""
    if not _is_dense(parameter):
        return values.contiguous()
    stored = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.float32)
    stored.copy_(values)
    return stored.as_strided((parameter.numel(),), (1,))


def _is_dense(parameter):
    """Whether its elements fill a piece of memory, each once, in whatever order: then so they do in buckets."""
    by_stride = sorted(zip(parameter.stride(), parameter.shape))
    expected = 1
    for stride, size in by_stride:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
