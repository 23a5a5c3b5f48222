from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy
from numpy.typing import NDArray
from typing_extensions import Buffer as HasBuffer

Kind = Literal["conv", "matrix", "vector"]
# The number of elements of a bin, "dense", "half" (float16), or "top-k P" with P percent.
Treatment = int | str
Codec = Literal["rice", "paper"]
Strategy = Literal["auto", "dense", "gather", "reduce", "sharded"]
Floats = NDArray[numpy.float32]
# NumPy says that arrays are buffers from Python 3.12 on only.
Buffer = HasBuffer | NDArray[Any]

class Error(ValueError):
    """What was given cannot be used; nothing was changed."""

class ExchangeError(RuntimeError):
    """Learners could not exchange their gradients."""

class Layout:
    """The parameters of a model in a fixed order, and how the gradient of each travels.

    A parameter is its name, shape and kind; without a kind, two or three dimensions are a matrix and more a convolution kernel.
    The defaults are the paper's: bins of 50 for kernels and of 500 for matrices; vectors and tensors of fewer than 1,024
    elements dense. ``names`` are patterns and their treatments, of which the last that matches wins.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Sequence[int], Kind | None]],
        *,
        conv: Treatment | None = None,
        matrix: Treatment | None = None,
        vector: Treatment | None = None,
        min_elements: int = 1024,
        soft_threshold: float = 2.0,
        scale: Literal["mean", "clamped"] = "mean",
        names: Sequence[tuple[str, Treatment]] = (),
    ) -> None: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def elements(self) -> list[int]: ...
    @property
    def treatments(self) -> list[Treatment]: ...

def kind(dimensions: int, in_convolution: bool) -> Kind:
    """Returns the kind of a parameter, from its number of dimensions and whether it belongs to a convolution."""

class Compressor:
    """Compresses the gradients of one model on one learner, and keeps what was not sent.

    A step is begun by the first gradient, then committed once every learner has its frame, or dropped.
    """

    def __init__(self, layout: Layout) -> None: ...
    @property
    def is_finite(self) -> bool: ...
    def compress(self, gradients: dict[str, Any]) -> None: ...
    def encode(self, learner: int = 0, step: int = 0, codec: Codec = "rice") -> bytes: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def residual(self, name: str) -> Floats | None: ...
    def statistics(self) -> dict[str, dict[str, Any]]: ...

class Frame:
    """What a frame says, checked."""

    def __init__(self, data: Buffer, layout: Layout) -> None: ...
    @property
    def learner(self) -> int | None: ...
    @property
    def step(self) -> int | None: ...
    @property
    def is_finite(self) -> bool: ...
    def packets(self) -> dict[str, tuple[NDArray[numpy.uint32], Floats]]: ...

def average(layout: Layout, step: int, frames: Sequence[Buffer], output: dict[str, Any]) -> int | None:
    """Averages the frames of all learners of a step into a float32 buffer for each parameter name.

    Returns None if it did; or the number of the first learner whose gradient is not finite, in which case nothing is written and
    the step must be dropped.
    """

class Transport(Protocol):
    """Carries bytes between learners. Rounds are finished in the order in which they were started."""

    learner: int
    learners: int
    def start_all_gather(self, message: bytes) -> None: ...
    def start_all_to_all(self, messages: list[bytes]) -> None: ...
    def finish(self) -> Sequence[Buffer]: ...

Arrays = Mapping[str, Floats]

class Exchange:
    """One learner's side of every step over a transport: gradients in, by buckets, and the averaged gradient out into the same
    buckets. What :mod:`adacomp.torch` is built on.

    With ``skip_unused``, parameters whose gradient is zero everywhere send nothing and keep their residual.
    """

    def __init__(
        self,
        layout: Layout,
        strategy: Strategy,
        codec: Codec,
        transport: Transport,
        threads: int = 1,
        skip_unused: bool = False,
        clip: float | None = None,
    ) -> None: ...
    @property
    def strategy(self) -> str: ...
    @property
    def step(self) -> int: ...
    def set_loss_scale(self, scale: float) -> None: ...
    def submit(self, bucket: Buffer, layers: Sequence[int]) -> None: ...
    def submit_selection(self, layers: Sequence[int], selected: Buffer, maxima: Buffer, dense: Buffer) -> None: ...
    def finish_selection(
        self, buckets: Sequence[tuple[Sequence[int], str]]
    ) -> tuple[int | None, list[tuple[NDArray[numpy.int32], int, int]]]: ...
    def finish(self, buckets: Sequence[tuple[Buffer, Sequence[int]]]) -> int | None: ...
    def add_residuals(self, bucket: Buffer, layers: Sequence[int]) -> tuple[bool, bool]: ...
    def end_elsewhere(self, arrived: bool) -> None: ...
    def residual(self, layer: int) -> Floats | None: ...
    def kept(self, layer: int) -> Floats | None: ...
    def set_residual(self, layer: int, values: Buffer) -> None: ...
    def save(self) -> tuple[dict[str, Floats], dict[str, Floats], str]: ...
    def saved_by(self, learner: int, learners: int) -> str: ...
    def load(self, states: Sequence[tuple[Arrays, Arrays, str]]) -> None: ...
    def statistics(self) -> dict[str, dict[str, Any]]: ...
    def seconds(self) -> tuple[float, float, float, float]: ...

class Learners:
    """All learners of a run, for experiments in one process and on one thread: the gradients of each in, and the averaged
    gradient out, to the bit what as many processes get."""

    def __init__(
        self,
        layout: Layout,
        learners: int,
        strategy: Strategy = "gather",
        owner_divisor: int = 1,
    ) -> None: ...
    def submit(self, learner: int, gradients: Sequence[Buffer]) -> None: ...
    def finish(self, output: Sequence[Buffer]) -> int | None: ...
    def traffic(self) -> tuple[float, float]: ...
    def sizes(self) -> dict[str, dict[str, float]]: ...
    def residual_norms(self, learner: int = 0) -> list[float | None]: ...
    def save(self) -> list[tuple[bytes, bytes | None]]: ...
    def load(self, states: Sequence[tuple[bytes, bytes | None]]) -> None: ...
