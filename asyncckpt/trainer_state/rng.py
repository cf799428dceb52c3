"""The states of all generators of random numbers that a trainer draws from, as plain values."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from asyncckpt.errors import IncompatibleError, UnsupportedError, Words, must_be
from asyncckpt.model.own_rank import own_rank
from asyncckpt.trainer_state.plain import from_plain, to_plain

RanksChanged = Literal["spread", "keep", "raise"]
RANKS_CHANGED: tuple[RanksChanged, ...] = ("spread", "keep", "raise")
PYTHON_WORDS = 625
_STATE_ERRORS = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


class RngState:
    """Python's `random`, NumPy's global functions, torch on the CPU and on CUDA devices in use; and named generators.

    generators      more to save: name -> torch.Generator, numpy.random.Generator, numpy.random.RandomState or
                    random.Random. The same names are needed to load
    rank,           this process and how many save together; default: those of torch.distributed where it is
    ranks_count     initialised, else 0 of 1
    ranks_changed   what becomes of the global streams when a checkpoint of another number of ranks is loaded, of which
                    every rank gets the values of rank 0: "spread": rank 0 goes on with them, the others with streams
                    of their own derived from them; "keep": all go on with the same; "raise": IncompatibleError. Named
                    generators always go on as they were saved

    CUDA that a process has not used has no states to save; states of devices that are not there are left out of a load.
    The state is read when a save begins, and set, on the calling thread, at the end of a load: draw nothing between a
    load and the first step that the uninterrupted run did not draw there.
    """

    def __init__(
        self,
        *,
        generators: Mapping[str, Any] | None = None,
        rank: int | None = None,
        ranks_count: int | None = None,
        ranks_changed: RanksChanged = "spread",
    ) -> None:
        if ranks_changed not in RANKS_CHANGED:
            raise must_be("ranks_changed", RANKS_CHANGED, ranks_changed)
        self._named = {name: stream_of(source, name) for name, source in (generators or {}).items()}
        self._given_rank = (rank, ranks_count)
        self._ranks_changed = ranks_changed
        own_rank(rank, ranks_count)  # Refused now rather than at the first save.

    def state_dict(self) -> dict[str, Any]:
        """Return the states as plain values (bytes, ints, floats)."""
        rank, ranks_count = own_rank(*self._given_rank)
        return {
            "rank": rank,
            "ranks_count": ranks_count,
            "streams": {name: stream.read() for name, stream in global_streams(start_cuda=False).items()},
            "generators": {name: stream.read() for name, stream in self._named.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all states; IncompatibleError, with nothing changed, where one is missing or cannot be taken."""
        for stream, value in self._check_saved(state):
            stream.write(value)

    def _check_saved(self, state: Any) -> list[tuple[Stream, Any]]:
        """Return streams with the states that they get."""
        try:
            saved, named = dict(state["streams"]), dict(state["generators"])
            saved_rank = (state["rank"], state["ranks_count"])
        except (KeyError, TypeError, ValueError) as error:
            raise IncompatibleError(f"this is not a state of random numbers: {error!r}") from error
        streams = global_streams(start_cuda=any(name.startswith("cuda:") for name in saved))
        missing = {"python", "numpy", "torch"} - saved.keys()
        if missing or named.keys() != self._named.keys():
            raise IncompatibleError(
                "the saved generators of random numbers are others",
                found=sorted([*saved, *named]),
                expected=sorted([*streams, *self._named]),
                hint="name the same ones in RngState(generators=...)",
            )
        wanted = {name: value for name, value in saved.items() if name in streams}
        for name, value in wanted.items():
            _check(streams[name], name, value)
        for name, value in named.items():
            _check(self._named[name], name, value)
        rank = own_rank(*self._given_rank)
        if saved_rank != rank:
            wanted = self._for_other_rank(wanted, streams, saved_rank=saved_rank, rank=rank)
        of_process = [(streams[name], value) for name, value in wanted.items()]
        return of_process + [(self._named[name], value) for name, value in named.items()]

    def _for_other_rank(
        self,
        states: Mapping[str, Any],
        streams: Mapping[str, Stream],
        *,
        saved_rank: tuple[int, int],
        rank: tuple[int, int],
    ) -> dict[str, Any]:
        if self._ranks_changed == "raise":
            raise IncompatibleError(
                "the random numbers are those of another rank",
                found=Words(f"rank {saved_rank[0]} of {saved_rank[1]}"),
                expected=f"rank {rank[0]} of {rank[1]}",
                hint="use RngState(ranks_changed='spread'), or 'keep'",
            )
        if self._ranks_changed == "keep" or saved_rank[0] == rank[0]:
            return dict(states)
        return {name: streams[name].seeded(_derived_seed(name, value, rank)) for name, value in states.items()}


def _check(stream: Stream, name: str, state: Any) -> None:
    try:
        stream.check(state)
    except _STATE_ERRORS as error:
        raise IncompatibleError(
            f"generator {name!r} cannot take the state that was saved: {error}",
            hint="it must be of the same kind, for example the same bit generator of NumPy",
        ) from error


def _derived_seed(name: str, state: Any, rank: tuple[int, int]) -> int:
    """Return a seed that depends on state, name, rank and number of ranks; 63 bits, which every generator takes."""
    text = repr((name, rank, state)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Stream:
    """One stream of random numbers.

    get    returns the state of a generator as plain values
    set    gives one to a generator; raises what the generator raises for a state that it cannot take
    fresh  makes a new generator of the same kind from a seed
    """

    source: Any
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]
    fresh: Callable[[int], Any]

    def read(self) -> Any:
        return self.get(self.source)

    def check(self, state: Any) -> None:
        self.set(self.fresh(0), state)

    def write(self, state: Any) -> None:
        self.set(self.source, state)

    def seeded(self, seed: int) -> Any:
        """Return the state of a new generator of the same kind."""
        return self.get(self.fresh(seed))


def stream_of(source: Any, name: str) -> Stream:
    """Return the stream behind a generator; UnsupportedError naming it unless it has a state."""
    if isinstance(source, torch.Generator):
        return Stream(source, _torch_state, _set_torch, lambda seed: torch.Generator(source.device).manual_seed(seed))
    if isinstance(source, (np.random.Generator, np.random.RandomState)):
        bits: Any = source._bit_generator if isinstance(source, np.random.RandomState) else source.bit_generator
        return Stream(source, _numpy_state, _set_numpy, lambda seed: type(source)(type(bits)(seed)))
    if isinstance(source, random.Random) and not isinstance(source, random.SystemRandom):
        return Stream(source, _python_state, _set_python, random.Random)
    raise UnsupportedError(
        f"generator {name!r} has no state that can be saved",
        found=type(source),
        expected="torch.Generator, numpy.random.Generator, numpy.random.RandomState or random.Random",
    )


def _python_state(source: Any) -> Any:
    version, words, gauss_next = source.getstate()
    return {"version": version, "words": np.array(words, dtype="<u4").tobytes(), "gauss_next": gauss_next}


def _set_python(source: Any, state: Any) -> None:
    words = np.frombuffer(state["words"], dtype="<u4")
    if words.size != PYTHON_WORDS:
        raise ValueError(f"{words.size} words, expected {PYTHON_WORDS}")
    source.setstate((state["version"], tuple(words.tolist()), state["gauss_next"]))


def _numpy_state(source: Any) -> Any:
    is_legacy = isinstance(source, np.random.RandomState)
    return to_plain(source.get_state(legacy=False) if is_legacy else source.bit_generator.state)


def _set_numpy(source: Any, state: Any) -> None:
    if isinstance(source, np.random.RandomState):
        source.set_state(from_plain(state))
    else:
        source.bit_generator.state = from_plain(state)


def _torch_state(source: torch.Generator) -> bytes:
    return source.get_state().numpy().tobytes()


def _set_torch(source: torch.Generator, state: Any) -> None:
    if not isinstance(state, bytes) or not state:
        raise TypeError(f"{type(state).__name__}, expected bytes")
    source.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def global_streams(*, start_cuda: bool) -> dict[str, Stream]:
    """Return the streams that all code draws from: Python's, NumPy's, torch's on the CPU, and on every CUDA device.

    CUDA that this process has not used yet is left alone unless `start_cuda`.
    """
    streams: dict[str, Stream] = {
        "python": Stream(random, _python_state, _set_python, random.Random),
        "numpy": stream_of(np.random.mtrand._rand, "numpy"),
        "torch": stream_of(torch.default_generator, "torch"),
    }
    if start_cuda and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            streams[f"cuda:{index}"] = stream_of(generator, f"cuda:{index}")
    return streams
