"""A second process, which runs operations in the directories of the first one when that says so."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from asyncckpt.engine.follow import table_update
from asyncckpt.engine.load import run_load, verify
from asyncckpt.errors import CheckpointError
from asyncckpt.strategies import stored_state
from tests.pairs.gate import Place, PlaceGate
from tests.pairs.operations import BY_NAME, Operation
from tests.pairs.run_pairs import END_S_MAX, Running
from tests.pairs.world import FOREIGN, TwoSides
from tests.ranks.forked import end, fork_server, start

MESSAGE_S_MAX = 2 * END_S_MAX


@dataclass(frozen=True)
class OutcomeOfOperation:
    """How an operation ended, and the generations of the live state of its process."""

    error: Exception | None
    generations: tuple[float, float]


class OtherProcess:
    """The first process' view of the second one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self, operation: Operation, place: Place) -> None:
        """Run an operation there; with a place, until it has come there or ended."""
        self._connection.send((operation.name, place))
        if place is not None:
            self._receive()

    def open(self) -> None:
        """Let it go on from the place."""
        self._connection.send(None)

    def has_ended(self, seconds: float) -> bool:
        return self._connection.poll(seconds)

    def outcome(self) -> OutcomeOfOperation:
        found = self._receive()
        assert isinstance(found, OutcomeOfOperation)
        return found

    def _receive(self) -> object:
        assert self._connection.poll(MESSAGE_S_MAX), "the other process hangs"
        return self._connection.recv()


@contextmanager
def other_process(folder: Path, output: Path, *, looks_once: bool = False) -> Iterator[OtherProcess]:
    """A process that works in the folders of a World until the end of the block. looks_once: a broken one."""
    own, its = fork_server().Pipe()
    process = start(serve, (folder, its, looks_once), output)
    try:
        yield OtherProcess(own)
        own.send(("", None))
        process.join(MESSAGE_S_MAX)
        assert process.exitcode == 0, output.read_text()[-3000:]
    finally:
        end(process)


def serve(folder: Path, connection: Connection, looks_once: bool) -> None:
    """Run what is sent, until an operation without a name."""
    warnings.simplefilter("ignore")
    if looks_once:
        for module in (run_load, verify, table_update, stored_state):
            module.look_again = lambda _, look: look()
    with PlaceGate().watching() as gate:
        world = TwoSides(gate, folder=folder)
        world.live = FOREIGN
        while True:
            name, place = connection.recv()
            if not name:
                return
            world.train()
            gate.arm(place)
            running = Running(BY_NAME[name], world, 0)
            if place is not None:
                while not gate.reached.wait(0.001) and not running.ended.is_set():
                    pass
                connection.send("held")
                connection.recv()
                gate.open()
            running.join()
            gate.arm(None)
            error, running.error = running.error, None
            if error is not None and not isinstance(error, CheckpointError):
                error = AssertionError(repr(error))
            # Without its traceback, which may hold what dcp.async_save has staged.
            outcome = pickle.dumps(OutcomeOfOperation(error, world.state.generation()))
            del error
            world.check_nothing_held()
            world.close()
            connection.send_bytes(outcome)
