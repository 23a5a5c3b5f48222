"""A speech corpus as the program has it: log-mel features of frames of 10 ms, each with a third of a phone in its context."""

import wave
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

# Samples a second, of a window, and from one window to the next.
RATE, WINDOW, STEP = 16_000, 400, 160
# Features of a window, and points of the Fourier transform.
BANDS, POINTS = 40, 512
# Frames that a sample has on either side.
AROUND = 5
# Every tenth utterance is for tests.
TEST = 10
# As festival names it.
SILENCE = "pau"

# A third of a phone between two others; an empty neighbour stands for any.
Sound = tuple[str, int, str, str]
Floats = NDArray[numpy.float32]


class Speech:
    """Samples of 11 frames of 40 features, the edges of an utterance repeated, and the state of the one in the middle."""

    def __init__(self, folder: Path) -> None:
        recordings = sorted(next(found for found in sorted(folder.rglob("wav")) if (found.parent / "lab").is_dir()).glob("*.wav"))
        features = [log_mel(read_wav(path)) for path in recordings]
        found = [sounds(len(frames), labels(path)) for path, frames in zip(recordings, features)]
        parts = [[index for index in range(len(found)) if (index % TEST == TEST - 1) == test] for test in (False, True)]
        counts = Counter(chain(*(found[index] for index in parts[0])))
        states = number_states({sound: counts[sound] for sound in set(chain(*found))})
        self.classes = len(set(states.values()))
        train = numpy.concatenate([features[index] for index in parts[0]]).astype(numpy.float64)
        mean, deviation = train.mean(0), train.std(0)
        (self.frames, self.places, self.labels), (self.test_frames, self.test_places, self.test_labels) = (
            self._part(
                [((features[index] - mean) / deviation).astype(numpy.float32) for index in part],
                [states[sound] for index in part for sound in found[index]],
            )
            for part in parts
        )

    @staticmethod
    def _part(utterances: list[Floats], states: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all frames, with repeated edges, where each sample starts in them, and its state."""
        edged = [numpy.pad(frames, ((AROUND, AROUND), (0, 0)), "edge") for frames in utterances if len(frames)]
        starts = numpy.cumsum([0, *map(len, edged)])
        places = numpy.concatenate([start + numpy.arange(len(frames) - 2 * AROUND) for start, frames in zip(starts, edged)])
        return torch.from_numpy(numpy.concatenate(edged)), torch.from_numpy(places), torch.tensor(states)

    def __len__(self) -> int:
        return len(self.labels)

    def begin_epoch(self, random: torch.Generator) -> None:
        pass

    def train(self, samples: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        return windows(self.frames, self.places[samples]), self.labels[samples]

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        for places, labels in zip(self.test_places.split(100), self.test_labels.split(100)):
            yield windows(self.test_frames, places), labels


def windows(frames: Tensor, places: Tensor) -> Tensor:
    return frames[places[:, None] + torch.arange(2 * AROUND + 1)].flatten(1)


def read_wav(path: Path) -> NDArray[numpy.int16]:
    with wave.open(str(path)) as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, RATE):
            raise ValueError(f"{path} is not 16-bit mono PCM of {RATE} samples a second: convert it")
        return numpy.frombuffer(file.readframes(file.getnframes()), numpy.int16)


def log_mel(samples: NDArray[numpy.int16]) -> Floats:
    """Returns the features of all windows that fit."""
    if len(samples) < WINDOW:
        return numpy.empty((0, BANDS), numpy.float32)
    cut = numpy.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::STEP].astype(numpy.float64)
    # The first sample of a recording has itself before it.
    before = numpy.concatenate([samples[:1], samples[:-1]])
    cut_before = numpy.lib.stride_tricks.sliding_window_view(before, WINDOW)[::STEP]
    spectrum = numpy.abs(numpy.fft.rfft(numpy.hamming(WINDOW) * (cut - 0.97 * cut_before), POINTS)) ** 2
    # The floor is below the noise of rounding to 16 bits.
    return numpy.log(numpy.maximum(spectrum @ filters(), 1.0)).astype(numpy.float32)


def filters() -> NDArray[numpy.float64]:
    """Returns weights by point and band: on the mel scale, triangles from the peak before to the peak after."""

    def mel(hertz: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        return 1127.0 * numpy.log1p(hertz / 700.0)

    low, high = mel(numpy.array([64.0, RATE / 2]))
    places = (mel(numpy.arange(POINTS // 2 + 1) * RATE / POINTS) - low) / (high - low) * (BANDS + 1)
    weights: NDArray[numpy.float64] = 1.0 - numpy.abs(places[:, None] - numpy.arange(1, BANDS + 1))
    return weights.clip(0.0)


def labels(recording: Path) -> list[tuple[int, str]]:
    """Returns the phones of a recording, each with the sample before which it ends."""
    path = recording.parent.parent / "lab" / f"{recording.stem}.lab"
    lines = path.read_text(errors="replace").split("#\n", 1)[1].splitlines()
    words = [line.split(";")[0].split() for line in lines if line.strip()]
    return [(int(float(end) * RATE + 0.5), phone) for end, _, phone in words]


def sounds(frames: int, labels: list[tuple[int, str]]) -> list[Sound]:
    """Returns the sound of each frame, by where its middle is. What is after the last label belongs to that."""
    ends, phones = [end for end, _ in labels], [SILENCE, *(phone for _, phone in labels), SILENCE]
    found = []
    for frame in range(frames):
        middle = frame * STEP + WINDOW // 2
        index = min(bisect_right(ends, middle), len(ends) - 1)
        start = ends[index - 1] if index else 0
        third = min(3 * (middle - start) // max(1, ends[index] - start), 2)
        found.append((phones[index + 1], third, phones[index], phones[index + 2]))
    return found


def number_states(counts: dict[Sound, int]) -> dict[Sound, int]:
    """Returns the state of each sound. What is too rare for one of its own falls back, together with what else is, to its left
    neighbour, its right one, or any."""
    few = max(80, sum(counts.values()) // 8000)
    rest, states = dict(counts), dict[Sound, Sound]()
    for level, least in enumerate([few, few, few, 0]):
        sums = Counter[Sound]()
        for sound, count in rest.items():
            sums[fallen_back(sound, level)] += count
        states |= {sound: fallen_back(sound, level) for sound in rest if sums[fallen_back(sound, level)] >= least}
        rest = {sound: count for sound, count in rest.items() if sound not in states}
    numbers = {state: number for number, state in enumerate(sorted(set(states.values())))}
    return {sound: numbers[state] for sound, state in states.items()}


def fallen_back(sound: Sound, level: int) -> Sound:
    phone, third, left, right = sound
    return phone, third, left if level in (0, 1) else "", right if level in (0, 2) else ""
