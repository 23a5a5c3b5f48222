"""What a hook says of itself."""

from dataclasses import dataclass, field


@dataclass
class Counts:
    """Sums over steps."""

    plain: int = 0
    flush: int = 0
    compressed: int = 0
    dropped: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0
    last: dict = field(default_factory=dict)

    def steps(self):
        return self.plain + self.flush + self.compressed

    def compressed_step(self, engine, sent, good):
        self.compressed += 1
        dense = dense_bytes(engine)
        self.bytes_sent += sent
        self.dense_bytes += dense
        seconds = dict(zip(("compress", "encode", "wait", "decode"), engine.exchange.seconds()))
        self.last = {"bytes_sent": sent, "rate": _rate(dense, sent), "averaged": good, "seconds": seconds}


def dense_bytes(engine):
    """What the same exchange would send without compression: everything to everybody, or twice through owners."""
    elements, learners = sum(engine.layout.elements), engine.learners
    if engine.options["strategy"] == "gather":
        return 4 * elements * (learners - 1)
    return 2 * 4 * elements * (learners - 1) // learners


def _rate(dense, sent):
    return dense / sent if sent else None


def compressing(engine):
    if engine.auto:
        return engine.auto.compressing
    return engine.options["mode"] == "on"


def why(engine):
    if engine.auto:
        return engine.auto.reason
    if engine.options["mode"] == "auto":
        return "there is one learner, so there is nothing to exchange"
    return f'mode="{engine.options["mode"]}"'


def stats(engine, layers):
    counts = engine.counts
    treatments = dict(zip(engine.layout.names, engine.layout.treatments))
    for name, entry in layers.items():
        entry["treatment"] = treatments[name]
        copies = dense_bytes(engine) / (4 * sum(engine.layout.elements))
        entry["rate"] = _rate(4 * entry["elements"] * copies, entry["bytes"])
    return {
        "mode": engine.options["mode"],
        "compressing": compressing(engine),
        "why": why(engine),
        "strategy": engine.options["strategy"],
        "learners": engine.learners,
        "steps": {
            "compressed": counts.compressed,
            "dense": counts.plain + counts.flush,
            "dropped": counts.dropped,
        },
        "bytes_sent": counts.bytes_sent,
        "rate": _rate(counts.dense_bytes, counts.bytes_sent),
        "last": counts.last,
        "layers": layers,
    }


def introduction(engine):
    """One line for the log."""
    ways = engine.layout.treatments
    total = sum(engine.layout.elements)
    bins = sum(elements for elements, way in zip(engine.layout.elements, ways) if isinstance(way, int))
    return (
        f"AdaComp is attached: mode {engine.options['mode']}, {engine.options['strategy']} between {engine.learners} learners, "
        f"{sum(isinstance(way, int) for way in ways)} of {len(ways)} parameters ({100 * bins / max(total, 1):.1f}% of "
        f"{total:,} elements) are compressed"
        + (", after each learner's own Adam: the optimiser must be SGD" if engine.moments else "")
    )


def describe(engine):
    counts = engine.counts
    now = f"compresses with {engine.options['strategy']}" if compressing(engine) else "sends gradients dense"
    lines = [
        f"AdaComp hook, mode {engine.options['mode']}: {now}, {engine.learners} learners",
        f"  why: {why(engine)}",
        f"  steps: {counts.compressed} compressed, {counts.plain + counts.flush} dense, {counts.dropped} dropped",
    ]
    if engine.moments:
        lines.append("  local_adam: each learner's Adam comes first, so the optimiser must be SGD without momentum")
    rate = _rate(counts.dense_bytes, counts.bytes_sent)
    if rate:
        lines.append(f"  sent in compressed steps: {counts.bytes_sent:,} bytes, {rate:.1f} times less than dense")
    groups = {}
    for elements, way in zip(engine.layout.elements, engine.layout.treatments):
        key = f"bins of {way}" if isinstance(way, int) else way
        parameters, sum_of = groups.get(key, (0, 0))
        groups[key] = (parameters + 1, sum_of + elements)
    lines += [f"  {key}: {count} parameters, {elements:,} elements" for key, (count, elements) in sorted(groups.items())]
    return "\n".join(lines)


def log(engine, writer):
    """Scalars for TensorBoard."""
    counts, step = engine.counts, engine.counts.steps()
    writer.add_scalar("adacomp/compressing", float(compressing(engine)), step)
    writer.add_scalar("adacomp/dropped_steps", counts.dropped, step)
    if counts.last:
        writer.add_scalar("adacomp/bytes_sent", counts.last["bytes_sent"], step)
        if counts.last["rate"]:
            writer.add_scalar("adacomp/rate", counts.last["rate"], step)
        for what, seconds in counts.last["seconds"].items():
            writer.add_scalar(f"adacomp/seconds/{what}", seconds, step)
