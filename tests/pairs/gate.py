"""Where an operation is held while another one runs: in what the user gave it, between reads, at the storage.

state_dict        of an object of the state, read at the beginning of a save
filter            the filter function of a Saver, in the background
read              when the first block of a checkpoint was read
fill              when a load has filled one of the dense tensors
load_state_dict   of that object, when all tensors of a load are filled
a number          that operation of the storage, counted from 1, on whatever thread
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from asyncckpt.shard.reader import ChainReader
from tests.worlds.storage_calls import before_each

HELD_S_MAX = 60.0
OPERATIONS = (
    *("make_folder", "create_file", "sync", "publish", "exists", "check_file", "has", "names", "child"),
    *("read_file", "remove_file", "remove_folder", "move"),
)
READS = ("version", "folder_version", "size", "open_file")  # Of files one by one.
Place = str | int | None


def before_each_operation(hook: Callable[[], None], *, more: Sequence[str] = ()) -> AbstractContextManager[None]:
    """Call the hook before every operation of the storage, on the thread that makes it. more: operations to add."""
    return before_each(lambda _: hook(), (*OPERATIONS, *more))


class PlaceGate:
    """Holds the first thread that comes to a place, until `open`. None: nobody is held."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.is_half_filled: Callable[[], bool] = lambda: False
        self.arm(None)

    def arm(self, place: Place) -> None:
        with self._guard:
            self.place: Place = place
            self.operations_count = 0
            self.reached, self._opened = threading.Event(), threading.Event()

    def open(self) -> None:
        self._opened.set()

    def reach(self, place: str) -> None:
        self._hold(place == self.place)

    def _hold(self, is_place: bool) -> None:
        with self._guard:
            if not is_place or self.reached.is_set() or self._opened.is_set():
                return
            self.reached.set()
            opened = self._opened
        assert opened.wait(HELD_S_MAX), "a gate was not opened"

    def _operation(self) -> None:
        with self._guard:
            self.operations_count += 1
            is_place = self.operations_count == self.place
        self._hold(is_place)

    @contextmanager
    def watching(self) -> Iterator[PlaceGate]:
        """Come to the places of storage and fills."""
        run = ChainReader.run

        def run_in_pieces(reader: ChainReader) -> None:
            reads, reader._queue = reader._queue, []
            for read in reads:
                reader._queue = [read]
                run(reader)
                self.reach("read")
                if self.is_half_filled():
                    self.reach("fill")

        with before_each_operation(self._operation), pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChainReader, "run", run_in_pieces)
            yield self
