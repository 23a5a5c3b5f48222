"""What a hook keeps, to and from dicts of tensors."""

import torch

TEXT = "adacomp"
RESIDUAL, OWNER = "residual.", "owner."
# Those of `local_adam`, by parameter: how many gradients they are of, and both.
STEPS, FIRST, SECOND = "adam.steps.", "adam.first.", "adam.second."


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
    read = [_read(state, parameters) for state in states]
    saved_by_own = f"learner {engine.transport.learner} of {engine.learners},"
    own = [state for state, (_, _, text) in zip(states, read) if saved_by_own in text]
    moments = _read_moments(engine, own or states)
    engine.exchange.load(read)
    engine.path.take()
    if engine.moments:
        engine.moments.kept = moments


def _save_moments(engine, consolidate):
    """This learner's, or the average of all learners'."""
    saved = {}
    for number, (name, parameter) in enumerate(zip(engine.layout.names, engine.parameters)):
        steps, *both = engine.moments.kept.get(number) or (0, *(torch.zeros(parameter.numel()) for _ in range(2)))
        both = [moment.to("cpu", copy=True) for moment in both]
        steps = torch.tensor([steps])
        if consolidate:
            for tensor in (steps, *both):
                engine.transport.wait(engine.transport.start_sum(tensor))
            steps, both = steps // engine.learners, [moment / engine.learners for moment in both]
        saved[STEPS + name] = steps
        saved |= {key + name: _shaped(moment, parameter) for key, moment in zip((FIRST, SECOND), both)}
    return saved


def _read_moments(engine, states):
    """By number of the parameter: those of one state, or the average of those of several."""
    have = any(key.startswith(STEPS) for state in states for key in state)
    if have and not engine.moments:
        raise ValueError("the state has Adam's moments: attach with local_adam=adacomp.torch.LocalAdam()")
    if engine.moments and not have:
        raise ValueError("the state has no moments of Adam, and its residuals are of gradients: attach without local_adam")
    moments = {}
    for number, (name, parameter) in enumerate(zip(engine.layout.names, engine.parameters) if have else ()):
        for key in (STEPS, FIRST, SECOND):
            shape = (1,) if key == STEPS else tuple(parameter.shape)
            for state in states:
                if key + name not in state or tuple(state[key + name].shape) != shape:
                    raise ValueError(f"{key}{name} is missing in a state, or has another shape than {shape}")
        steps = max(int(state[STEPS + name]) for state in states)
        if steps:
            both = (sum(_flat(state[key + name].cpu(), parameter) for state in states) for key in (FIRST, SECOND))
            both = (moment.reshape(-1).to(parameter.device, torch.float32) / len(states) for moment in both)
            moments[number] = (steps, *both)
    return moments


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
    if any(other != tag for other in engine.transport.all_gather(tag)):
        raise RuntimeError("state_dict(consolidate=True) must be called by all learners, after the same step")
    residuals = {}
    for number, name in enumerate(engine.layout.names):
        values = engine.exchange.kept(number)
        if values is None:
            continue
        total = torch.from_numpy(values)
        engine.transport.wait(engine.transport.start_sum(total))
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
