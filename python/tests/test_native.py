"""The package without PyTorch: any buffers, and the same frames as in Rust."""

import array
import ast
import inspect
from pathlib import Path

import numpy
import pytest

import adacomp
from adacomp import _native, research
from adacomp.research import Compressor, Exchange, Frame, Layout, Learners, average

GOLDEN = Path(__file__).parents[2] / "crates/adacomp/tests/golden"
PARAMETERS = [("conv.weight", (16, 8, 3, 3), None), ("fc.weight", (40, 60), None), ("fc.bias", (40,), None)]


class Random:
    """The generator of the Rust tests."""

    def __init__(self, seed):
        self.state = seed

    def value(self):
        mask = 2**64 - 1
        self.state ^= self.state << 13 & mask
        self.state ^= self.state >> 7
        self.state ^= self.state << 17 & mask
        number = self.state * 0x2545F4914F6CDD1D & mask
        unit = numpy.float32(number >> 40) / numpy.float32(8_388_608.0) - numpy.float32(1.0)
        return unit * unit * unit

    def gradients(self, layout):
        return {
            name: numpy.array([self.value() for _ in range(elements)], numpy.float32)
            for name, elements in zip(layout.names, layout.elements)
        }


class Echo:
    """A transport by which all learners send the same."""

    def __init__(self, learner=0, learners=1):
        self.learner, self.learners, self.sent = learner, learners, []

    def start_all_gather(self, message):
        self.sent.append([message] * self.learners)

    def start_all_to_all(self, messages):
        self.sent.append(messages)

    def finish(self):
        return self.sent.pop(0)


SCHEMES = {
    "adacomp": {},
    "local-selection": {"soft_threshold": 1.0},
    "top-k": {"conv": "top-k 1.0", "matrix": "top-k 1.0"},
    "half": {"conv": "half", "matrix": "half", "vector": "half", "min_elements": 0},
    "dense": {"conv": "dense", "matrix": "dense", "vector": "dense", "min_elements": 0},
}


@pytest.mark.parametrize("codec", ["rice", "paper"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_frames_are_those_of_the_rust_crate(scheme, codec):
    layout = Layout(PARAMETERS, **SCHEMES[scheme])
    compressor, random = Compressor(layout), Random(51)
    for step in range(3):
        compressor.compress(random.gradients(layout))
        frame = compressor.encode(7, step, codec)
        compressor.commit()
    assert frame == (GOLDEN / f"{scheme}.{codec}.frame").read_bytes()
    decoded = Frame(frame, layout)
    assert (decoded.learner, decoded.step, decoded.is_finite) == (7, 2, True)
    packets = decoded.packets()
    assert list(packets) == layout.names
    # The average of one learner's frame is what the frame says.
    compressor.compress(random.gradients(layout))
    frame = compressor.encode(codec=codec)
    output = {name: numpy.ones(elements, "f") for name, elements in zip(layout.names, layout.elements)}
    assert average(layout, 0, [frame], output) is None
    for name, (indices, values) in Frame(frame, layout).packets().items():
        expected = numpy.zeros(output[name].size, "f")
        expected[indices] += values
        assert numpy.array_equal(output[name], expected)


def test_a_frame_of_gradients_that_are_not_finite():
    layout = Layout(PARAMETERS)
    compressor = Compressor(layout)
    gradients = Random(52).gradients(layout)
    gradients["conv.weight"][5] = numpy.inf
    compressor.compress(gradients)
    assert not compressor.is_finite
    frame = compressor.encode(7, 2)
    assert frame == (GOLDEN / "non-finite.frame").read_bytes()
    assert not Frame(frame, layout).is_finite
    with pytest.raises(adacomp.Error, match="not finite"):
        compressor.commit()
    as_learner_1 = compressor.encode(1, 2)
    compressor.rollback()
    output = {name: numpy.zeros(elements, "f") for name, elements in zip(layout.names, layout.elements)}
    other = Compressor(layout)
    other.compress(Random(3).gradients(layout))
    assert average(layout, 2, [other.encode(0, 2), as_learner_1], output) == 1
    assert not any(values.any() for values in output.values())
    with pytest.raises(adacomp.Error, match="learner 7"):
        average(layout, 2, [other.encode(0, 2), frame], output)


def test_the_average_of_frames():
    layout = Layout(PARAMETERS)
    compressors = [Compressor(layout) for _ in range(3)]
    for learner, compressor in enumerate(compressors):
        compressor.compress(Random(learner + 1).gradients(layout))
    frames = [compressor.encode(learner, 5) for learner, compressor in enumerate(compressors)]
    mean = {name: numpy.full(elements, 9.0, "f") for name, elements in zip(layout.names, layout.elements)}
    assert average(layout, 5, frames, mean) is None
    total = {name: numpy.zeros(elements, "f") for name, elements in zip(layout.names, layout.elements)}
    for frame in frames:
        for name, (indices, values) in Frame(frame, layout).packets().items():
            total[name][indices] += values
    for name in layout.names:
        assert numpy.array_equal(mean[name], total[name] * numpy.float32(1 / 3))


def test_any_buffer_will_do():
    layout = Layout([("w", (50, 40), None)])
    values = numpy.random.default_rng(1).standard_normal(2000).astype("f")
    frames = set()
    for buffer in (values, values.reshape(50, 40), memoryview(values), array.array("f", values)):
        compressor = Compressor(layout)
        compressor.compress({"w": buffer})
        frames.add(compressor.encode())
    assert len(frames) == 1
    halves = Compressor(layout)
    halves.compress({"w": values.astype(numpy.float16)})
    singles = Compressor(layout)
    singles.compress({"w": values.astype(numpy.float16).astype("f")})
    assert halves.encode() == singles.encode()
    # bfloat16 is the upper half of a float32.
    bits = values.view(numpy.uint32) >> 16
    upper = Compressor(layout)
    upper.compress({"w": bits.astype(numpy.uint16)})
    rounded = Compressor(layout)
    rounded.compress({"w": (bits << 16).view("f")})
    assert upper.encode() == rounded.encode()


@pytest.mark.parametrize(
    "buffer, told",
    [
        (numpy.zeros(1999, "f"), "1999"),
        (numpy.zeros(2000, "d"), "float32"),
        (numpy.zeros(4000, "f")[::2], "contiguous"),
        (numpy.zeros((40, 50), "f").T, "numpy.ascontiguousarray"),
        (numpy.zeros((40, 50), "f"), r"shape \[40, 50\] for parameter `w`; expected \[50, 40\]"),
        (numpy.zeros((1, 2000), "f"), r"shape \[1, 2000\]"),
        (numpy.frombuffer(b"x" * 8001, numpy.uint8)[1:].view("f"), "aligned"),
        ([0.0] * 2000, "bytes-like"),
    ],
)
def test_what_cannot_be_used_is_refused(buffer, told):
    compressor = Compressor(Layout([("w", (50, 40), None)]))
    with pytest.raises((adacomp.Error, TypeError), match=told):
        compressor.compress({"w": buffer})
    assert not compressor.residual("w").any()


def test_outputs_and_buckets_have_the_layouts_shapes_too():
    layout = Layout([("w", (50, 40), None)])
    transposed, swapped = numpy.zeros((40, 50), "f").T, numpy.zeros((40, 50), "f")
    compressor = Compressor(layout)
    compressor.compress({"w": numpy.ones((50, 40), "f")})
    frame = compressor.encode()
    learners = Learners(layout, 1)
    learners.submit(0, [numpy.ones((50, 40), "f")])
    exchange = Exchange(layout, "gather", "rice", Echo())
    ways = (
        lambda buffer: average(layout, 0, [frame], {"w": buffer}),
        lambda buffer: learners.finish([buffer]),
    )
    for buffer, told in ((transposed, "C order"), (swapped, "shape")):
        for way in ways:
            with pytest.raises(adacomp.Error, match=told):
                way(buffer)
        assert not buffer.any()
    with pytest.raises(adacomp.Error, match="shape"):
        exchange.set_residual(0, swapped)
    with pytest.raises(adacomp.Error, match="numpy.ravel"):
        exchange.submit(numpy.ones((50, 40), "f"), [0])
    output = numpy.zeros((50, 40), "f")
    assert learners.finish([output]) is None
    assert output.all()


def test_errors_say_what_to_do():
    layout = Layout([("w", (50, 40), None)])
    compressor = Compressor(layout)
    for call, told in [
        (lambda: Layout([("w", (5,), "tensor")]), "expected conv, matrix or vector"),
        (lambda: Layout([("w", (5,), None)], conv="sparse"), "number of elements of a bin"),
        (lambda: Layout([("w", (50, 40), None)], names=[("w", 0)]), "bin"),
        (lambda: Layout([("w", (50, 40), None)], matrix=True), "number of elements of a bin"),
        (lambda: Layout([("w", (5,), None), ("w", (6,), None)]), "w"),
        (lambda: compressor.encode(codec="zip"), "expected rice or paper"),
        (lambda: compressor.encode(), "no step"),
        (lambda: compressor.residual("x"), "no parameter `x`"),
        (lambda: Exchange(layout, "gather", "rice", Echo()).set_loss_scale(0.0), "loss scale"),
        (lambda: Frame(b"nonsense", layout), "frame"),
        (lambda: average(layout, 0, [], {"w": numpy.zeros(2000, "f")}), "frame"),
        (lambda: average(layout, 0, [], {}), "no output for parameter `w`"),
        (lambda: average(layout, 0, [], {"w": numpy.zeros(2000, "d")}), "float32"),
    ]:
        with pytest.raises(adacomp.Error, match=told):
            call()
    read_only = numpy.zeros(2000, "f")
    read_only.flags.writeable = False
    compressor.compress({"w": numpy.ones(2000, "f")})
    frame = compressor.encode()
    with pytest.raises(adacomp.Error, match="read-only"):
        average(layout, 0, [frame], {"w": read_only})
    with pytest.raises(adacomp.Error, match="1999"):
        average(layout, 0, [frame], {"w": numpy.zeros(1999, "f")})


def test_any_bytes_give_a_frame_or_an_error():
    layout = Layout(PARAMETERS)
    compressor = Compressor(layout)
    compressor.compress(Random(4).gradients(layout))
    good = bytearray(compressor.encode())
    generator = numpy.random.default_rng(5)
    refused = 0
    for _ in range(2000):
        bad = bytearray(good)
        bad[generator.integers(len(bad))] ^= 1 << generator.integers(8)
        try:
            Frame(bad, layout)
        except adacomp.Error:
            refused += 1
    assert refused == 2000


def test_state_goes_on_with_another_number_of_learners():
    layout = Layout(PARAMETERS)
    shapes = {name: shape for name, shape, _ in PARAMETERS[:2]}
    residuals = [
        {name: numpy.random.default_rng(learner).standard_normal(shape).astype("f") for name, shape in shapes.items()}
        for learner in range(2)
    ]
    states = [(each, {}, f"residuals 1, learner {learner} of 2, step 9") for learner, each in enumerate(residuals)]
    same = Exchange(layout, "gather", "rice", Echo(1, 2))
    same.load([states[1]])
    assert same.step == 9
    assert numpy.array_equal(same.residual(1), residuals[1]["fc.weight"].ravel())
    other = Exchange(layout, "gather", "rice", Echo())
    other.load(states)
    mean = (residuals[0]["fc.weight"].astype("d") + residuals[1]["fc.weight"]) / 2
    assert numpy.allclose(other.residual(1), mean.ravel(), atol=1e-7)
    assert other.residual(2) is None
    with pytest.raises(adacomp.Error):
        other.load([states[1]])


def test_the_example_of_the_module_runs():
    _, example = research.__doc__.split("::\n", 1)
    exec(inspect.cleandoc(example.split("\n\n``")[0]), {})


def test_stubs_are_true():
    tree = ast.parse((Path(adacomp.__file__).parent / "_native.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and hasattr(_native, node.name):
            real = getattr(_native, node.name)
            stubbed = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            public = {name for name in vars(real) if not name.startswith("_")}
            assert {name for name in stubbed if not name.startswith("_")} == public, node.name
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name != "__init__":
                    check_signature(item, getattr(real, item.name))
        elif isinstance(node, ast.FunctionDef):
            check_signature(node, getattr(_native, node.name))
    native = {name for name in dir(_native) if not name.startswith("_")}
    stubbed = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert native == stubbed - {"Transport", "Inside"}


def check_signature(stub, real):
    signature = getattr(real, "__text_signature__", None)
    if signature:
        names = [argument.arg for argument in stub.args.args]
        assert names == [part.strip("$ ").split("=")[0] for part in signature.strip("()").split(", ") if part != "/"], stub.name


def test_everything_public_is_documented():
    assert research.__doc__ and adacomp.__version__
    for module in (adacomp, research):
        for name in module.__all__:
            assert name == "__version__" or inspect.getdoc(getattr(module, name)), name


def test_a_state_says_who_saved_it():
    exchange = Exchange(Layout(PARAMETERS), "gather", "rice", Echo())
    residuals, owner, text = exchange.save()
    assert text == exchange.saved_by(0, 1) == "residuals 1, learner 0 of 1, step 0"
    assert exchange.saved_by(2, 3) == "residuals 1, learner 2 of 3, step 0"
    exchange.load([(residuals, owner, "residuals 1, learner 0 of 1, step 9")])
    assert exchange.step == 9
    with pytest.raises(adacomp.Error, match="learner L of N, step S"):
        exchange.load([(residuals, owner, "nobody")])


def submit_all(learners, all_gradients, layout):
    for learner, gradients in enumerate(all_gradients):
        learners.submit(learner, list(gradients.values()))
    output = [numpy.empty(elements, numpy.float32) for elements in layout.elements]
    assert learners.finish(output) is None
    return output


def test_learners_in_one_process_are_as_many_compressors():
    layout, random = Layout(PARAMETERS), Random(5)
    learners = Learners(layout, 3)
    compressors = [Compressor(layout) for _ in range(3)]
    for step in range(4):
        all_gradients = [random.gradients(layout) for _ in compressors]
        output = submit_all(learners, all_gradients, layout)
        frames = []
        for number, (compressor, gradients) in enumerate(zip(compressors, all_gradients)):
            compressor.compress(gradients)
            frames.append(compressor.encode(number, step))
        mean = {name: numpy.empty(elements, numpy.float32) for name, elements in zip(layout.names, layout.elements)}
        assert average(layout, step, frames, mean) is None
        assert all((one == other).all() for one, other in zip(output, mean.values()))
        paper = sum(len(compressor.encode(number, step, "paper")) for number, compressor in enumerate(compressors))
        for compressor in compressors:
            compressor.commit()
        sizes = learners.sizes()
        sent, received = learners.traffic()
        # Beside the frame each other learner gets a verdict of 7 bytes.
        assert sent == received == 2 * (sum(map(len, frames)) / 3 + 7)
        # A frame has 36 bytes, and each section of a layer that is sent dense a few, that sizes do not have.
        for code, taken in (("rice", sum(map(len, frames))), ("paper", paper)):
            assert 36 <= taken / 3 - sum(layer[code] for layer in sizes.values()) < 41
        assert all(layer["floor"] <= layer["rice"] <= layer["paper"] for layer in sizes.values())
    norms = learners.residual_norms(1)
    assert norms[2] is None
    expected = numpy.linalg.norm(compressors[1].residual("fc.weight"))
    assert norms[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", ["gather", "reduce", "sharded"])
def test_learners_go_on_where_they_stopped(strategy):
    layout, random = Layout(PARAMETERS), Random(6)
    one = Learners(layout, 2, strategy)
    for _ in range(3):
        submit_all(one, [random.gradients(layout) for _ in range(2)], layout)
    other = Learners(layout, 2, strategy)
    other.load(one.save())
    all_gradients = [random.gradients(layout) for _ in range(2)]
    outputs = [submit_all(learners, all_gradients, layout) for learners in (one, other)]
    assert all((a == b).all() for a, b in zip(*outputs))
    with pytest.raises(adacomp.Error, match="gives 1 gradients"):
        one.submit(0, [numpy.zeros(1, numpy.float32)])
    with pytest.raises(adacomp.Error, match="no learners"):
        Learners(layout, 0)
    with pytest.raises(ValueError):
        Learners(layout, 2, owner_divisor=0)


@pytest.mark.parametrize("strategy", ["gather", "sharded"])
def test_residuals_decay(strategy):
    layout, random = Layout(PARAMETERS), Random(6)
    learners, gradients = Learners(layout, 2, strategy), random.gradients(layout)
    submit_all(learners, [gradients, gradients], layout)
    before = learners.residual_norms(1)
    learners.decay(0.5)
    assert before[1] > 0 and learners.residual_norms(1)[:2] == [norm / 2 for norm in before[:2]]
    exchange = Exchange(layout, strategy, "rice", Echo())
    bucket = numpy.concatenate(list(gradients.values()))
    exchange.submit(bucket, [0, 1, 2])
    with pytest.raises(adacomp.Error, match="open"):
        exchange.decay(0.5)
    assert exchange.finish([(bucket, [0, 1, 2])]) is None
    kept = exchange.kept(1)
    exchange.decay(0.25)
    assert kept.any() and (exchange.kept(1) == kept / 4).all()
    for each in (learners, exchange):
        with pytest.raises(adacomp.Error, match="from 0 to 1"):
            each.decay(1.5)


@pytest.mark.parametrize("wrong", range(len(PARAMETERS)))
def test_learners_check_all_gradients_before_they_take_any(wrong):
    layout = Layout(PARAMETERS)
    gradients, others = Random(7).gradients(layout), Random(8).gradients(layout)
    learners, undisturbed = Learners(layout, 2), Learners(layout, 2)
    bad = list(gradients.values())
    bad[wrong] = numpy.zeros(7, numpy.float32)
    with pytest.raises(adacomp.Error, match=f"`{layout.names[wrong]}`"):
        learners.submit(0, bad)
    learners.save()
    outputs = [submit_all(each, [gradients, others], layout) for each in (learners, undisturbed)]
    assert all((one == other).all() for one, other in zip(*outputs))


def test_buffers_for_writing_do_not_overlap():
    layout = Layout([("a", (40, 50), None), ("b", (40, 50), None), ("empty", (0,), None)])
    memory, empty = numpy.zeros(4000, numpy.float32), numpy.zeros(0, numpy.float32)
    ones = numpy.ones(2000, numpy.float32)
    compressor, learners, exchange = Compressor(layout), Learners(layout, 1), Exchange(layout, "gather", "rice", Echo())
    compressor.compress({"a": ones, "b": ones, "empty": empty})
    frame = compressor.encode()
    learners.submit(0, [ones, ones, empty])
    exchange.submit(ones, [0])
    exchange.submit(ones, [1, 2])
    ways = (
        lambda a, b: average(layout, 0, [frame], {"a": a, "b": b, "empty": empty}),
        lambda a, b: learners.finish([a, b, empty]),
        lambda a, b: exchange.finish([(a, [0]), (b, [1, 2])]),
    )
    for finish in ways:
        for a, b in ((memory[:2000], memory[:2000]), (memory[:2000], memory[1999:3999]), (memory[1:2001], memory[:2000])):
            with pytest.raises(adacomp.Error, match="overlap"):
                finish(a, b)
            assert not memory.any()
        # Side by side is apart.
        assert finish(memory[2000:], memory[:2000]) is None
        assert memory.all()
        memory[:] = 0.0


def test_a_clamped_scale_is_not_inflated():
    gradient = numpy.array([1, 0, 2, 0, 3, 0, 10_000, 0], numpy.float32)
    for scale, expected in (("mean", 10_006 / 4), ("clamped", 36 / 4)):
        layout = Layout([("weight", (8,), None)], min_elements=0, vector=2, scale=scale)
        compressor = Compressor(layout)
        compressor.compress({"weight": gradient})
        assert compressor.statistics()["weight"]["scale"] == expected
    with pytest.raises(adacomp.Error, match="expected mean or clamped"):
        Layout(PARAMETERS, scale="median")


def test_buckets_are_finished_as_they_were_given():
    layout = Layout([("a", (40, 50), None), ("b", (40, 50), None)])
    exchange = Exchange(layout, "gather", "rice", Echo())
    bucket = numpy.ones(2000, numpy.float32)
    exchange.submit(bucket, [0])
    for buckets in ([], [(bucket, [1])], [(bucket, [0]), (bucket, [1])]):
        with pytest.raises(adacomp.Error, match="as they were given"):
            exchange.finish(buckets)
    assert exchange.finish([(bucket, [0])]) is None
