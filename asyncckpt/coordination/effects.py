"""What a save does on its rank besides talking: the Protocol between the driver and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from asyncckpt.coordination.coordinator import AttemptStart
from asyncckpt.coordination.messages import AttemptMessage, Begin, Prepared
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Json


class Effects(Protocol):
    """Given by the engine. The coroutines run in the loop of `run_call`.

    While one of them keeps the loop, this rank cannot say that it is alive: what blocks for long belongs on a thread.
    """

    async def make_folder(self, begins: Mapping[int, Begin]) -> AttemptStart:
        """Rank 0: draw the attempt, make its folder, durably. May raise: the call is aborted."""
        ...

    async def write(self, attempt: AttemptMessage) -> Mapping[str, Json]:
        """Write and sync the files of this rank, put its part on the channel; return notes for PREPARED. May raise."""
        ...

    async def publish(self, attempt: Attempt, prepared: Mapping[int, Prepared]) -> Mapping[str, Json]:
        """Rank 0: assemble the manifest and publish it; return notes for the outcome.

        IndeterminateError when it may be there; whatever else is raised means that it is not there and never will be.
        """
        ...

    async def abandon(self, attempt: Attempt) -> None:
        """Rank 0: remove what an aborted attempt left. `write` of this rank has ended; others may still write."""
        ...

    async def look(self, attempt: Attempt) -> bool:
        """Whether the manifest of this attempt is there; if so, make that durable (sync its folder) before."""
        ...

    def stop(self) -> None:
        """The call has ended without `write`, which still runs: let it end soon, if that is possible.

        It is waited for, and never cancelled, for it reads memory that is given back afterwards.
        """
        ...

    def resolve(self, attempt: Attempt) -> bool:
        """As `look`, but any time after the call, from any thread, without anything that the save held open."""
        ...
