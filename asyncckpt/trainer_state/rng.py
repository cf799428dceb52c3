"""The state of all generators of random numbers that a trainer draws from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.model.own_rank import own_rank
from asyncckpt.trainer_state.streams import Stream, global_streams, stream_of

RanksChanged = Literal["spread", "keep", "raise"]
RANKS_CHANGED: tuple[RanksChanged, ...] = ("spread", "keep", "raise")
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
            raise UsageError("ranks_changed is wrong", found=ranks_changed, expected=RANKS_CHANGED)
        self._named = {name: stream_of(source, name) for name, source in (generators or {}).items()}
        self._given_rank = (rank, ranks_count)
        self._ranks_changed = ranks_changed
        own_rank(rank, ranks_count)  # Refused now rather than at the first save.

    def state_dict(self) -> dict[str, Any]:
        """The states as plain values (bytes, ints, floats)."""
        rank, ranks_count = own_rank(*self._given_rank)
        return {
            "rank": rank,
            "ranks_count": ranks_count,
            "streams": {name: stream.read() for name, stream in global_streams(start_cuda=False).items()},
            "generators": {name: stream.read() for name, stream in self._named.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all states; IncompatibleError, with nothing changed, where one is missing or cannot be taken."""
        try:
            saved, named = dict(state["streams"]), dict(state["generators"])
            saved_rank = (state["rank"], state["ranks_count"])
        except (KeyError, TypeError, ValueError) as error:
            raise IncompatibleError(f"this is no state of random numbers: {error!r}") from error
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
        for name, value in wanted.items():
            streams[name].write(value)
        for name, value in named.items():
            self._named[name].write(value)

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
                found=f"rank {saved_rank[0]} of {saved_rank[1]}",
                expected=f"rank {rank[0]} of {rank[1]}",
                hint="RngState(ranks_changed='spread' or 'keep') goes on with other numbers",
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
    """The same for the same saved state, name, rank and number of ranks; 63 bits, which every generator takes."""
    text = repr((name, rank, state)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
