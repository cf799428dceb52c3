"""One stream of random numbers: read its state as plain values, check one, set it, or make one from a seed."""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch

from asyncckpt.errors import UnsupportedError
from asyncckpt.trainer_state.plain import from_plain, to_plain

PYTHON_WORDS = 625


class Stream(Protocol):
    """States are plain values. `check` raises what the generator raises for a state that it cannot take."""

    def read(self) -> Any: ...

    def check(self, state: Any) -> None: ...

    def write(self, state: Any) -> None: ...

    def seeded(self, seed: int) -> Any:
        """The state of a new generator of the same kind."""


class PythonStream:
    """`random.Random`, or the module `random`, which has one inside."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self) -> Any:
        return _python_plain(self._source.getstate())

    def check(self, state: Any) -> None:
        random.Random().setstate(_python_state(state))

    def write(self, state: Any) -> None:
        self._source.setstate(_python_state(state))

    def seeded(self, seed: int) -> Any:
        return _python_plain(random.Random(seed).getstate())


def _python_plain(state: Any) -> Any:
    version, words, gauss_next = state
    return {"version": version, "words": np.array(words, dtype="<u4").tobytes(), "gauss_next": gauss_next}


def _python_state(plain: Any) -> Any:
    words = np.frombuffer(plain["words"], dtype="<u4")
    if words.size != PYTHON_WORDS:
        raise ValueError(f"{words.size} words, expected {PYTHON_WORDS}")
    return plain["version"], tuple(words.tolist()), plain["gauss_next"]


class NumpyStream:
    """`numpy.random.Generator`, and `RandomState`, of which NumPy's global functions have one."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self) -> Any:
        return to_plain(self._state_of(self._source))

    def check(self, state: Any) -> None:
        self._set(self._fresh(0), from_plain(state))

    def write(self, state: Any) -> None:
        self._set(self._source, from_plain(state))

    def seeded(self, seed: int) -> Any:
        return to_plain(self._state_of(self._fresh(seed)))

    def _fresh(self, seed: int) -> Any:
        is_legacy = isinstance(self._source, np.random.RandomState)
        bits = self._source._bit_generator if is_legacy else self._source.bit_generator
        return type(self._source)(type(bits)(seed))

    @staticmethod
    def _state_of(source: Any) -> Any:
        is_legacy = isinstance(source, np.random.RandomState)
        return source.get_state(legacy=False) if is_legacy else source.bit_generator.state

    @staticmethod
    def _set(source: Any, state: Any) -> None:
        if isinstance(source, np.random.RandomState):
            source.set_state(state)
        else:
            source.bit_generator.state = state


class TorchStream:
    """`torch.Generator` of any device."""

    def __init__(self, source: torch.Generator) -> None:
        self._source = source

    def read(self) -> Any:
        return self._source.get_state().numpy().tobytes()

    def check(self, state: Any) -> None:
        torch.Generator(device=self._source.device).set_state(_bytes_tensor(state))

    def write(self, state: Any) -> None:
        self._source.set_state(_bytes_tensor(state))

    def seeded(self, seed: int) -> Any:
        return torch.Generator(device=self._source.device).manual_seed(seed).get_state().numpy().tobytes()


def _bytes_tensor(state: Any) -> torch.Tensor:
    if not isinstance(state, bytes) or not state:
        raise TypeError(f"{type(state).__name__}, expected bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def stream_of(source: Any, name: str) -> Stream:
    """The stream behind a generator; UnsupportedError naming it for what is none that has a state."""
    if isinstance(source, torch.Generator):
        return TorchStream(source)
    if isinstance(source, (np.random.Generator, np.random.RandomState)):
        return NumpyStream(source)
    if isinstance(source, random.Random) and not isinstance(source, random.SystemRandom):
        return PythonStream(source)
    raise UnsupportedError(
        f"generator {name!r} has no state that can be saved",
        found=type(source).__name__,
        expected="torch.Generator, numpy.random.Generator, numpy.random.RandomState or random.Random",
    )


def global_streams(*, start_cuda: bool) -> dict[str, Stream]:
    """The streams that everybody draws from: Python's, NumPy's, torch's on the CPU, and on every CUDA device.

    CUDA that this process has not used yet is left alone unless `start_cuda`.
    """
    streams: dict[str, Stream] = {
        "python": PythonStream(random),
        "numpy": NumpyStream(np.random.mtrand._rand),
        "torch": TorchStream(torch.default_generator),
    }
    if start_cuda and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            streams[f"cuda:{index}"] = TorchStream(generator)
    return streams
