"""Which rank this is, and how ranks agree: on a step and a save id before a save, on success or failure after it.

Every agreement is a collective of the calling thread over a gloo group of our own, made at the first one. So it works
where the default group is NCCL's, never mixes with the collectives of training, and never runs on a background thread.
Only tensors of fixed size travel; nothing is pickled.

A rank that failed takes part in the agreement too, and says so. Otherwise the others would wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncckpt.errors import ConflictError, IOFailedError, UnsupportedError, UsageError

WORLD_SIZE_MAX = 99_999
SAVE_ID_BYTES = 16


def is_distributed() -> bool:
    """Whether torch.distributed has been initialised."""
    return dist.is_available() and dist.is_initialized()


def which_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world size): those of torch.distributed where it is initialised, else the arguments.

    Raises UsageError: no rank at all, no ints, out of range, or other numbers than torch.distributed says. Source of
    the rule: RecSDK `Saver`.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and type(value) is not int:
            raise UsageError(f"{name} is wrong", found=value, expected="an int")
    if is_distributed():
        own, world = dist.get_rank(), dist.get_world_size()
        if rank not in (None, own) or world_size not in (None, world):
            what = "rank or world_size is not that of torch.distributed"
            raise UsageError(what, found=(rank, world_size), expected=(own, world))
    elif rank is None:
        raise UsageError("rank is missing", hint="give it, or initialise torch.distributed first")
    else:
        own, world = rank, 1 if world_size is None else world_size
    if not 1 <= world <= WORLD_SIZE_MAX:
        raise UsageError("world_size is wrong", found=world, expected=f"an int in [1, {WORLD_SIZE_MAX}]")
    if not 0 <= own < world:
        raise UsageError("rank is wrong", found=own, expected=f"an int in [0, {world - 1}]")
    return own, world


@dataclass(frozen=True)
class AgreedSave:
    """What all ranks of one save share."""

    step: int
    save_id: str


class Peers:
    """The ranks of one Saver. All of them must make the same calls in the same order, on one thread each."""

    def __init__(self, rank: int, world_size: int, *, deadline_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._deadline_s = deadline_s
        self._group: Any = None
        self._made_within: Any = None

    def agree_on_save(
        self, *, next_step: int, step: int | None, save_id: str | None, error: Exception | None
    ) -> AgreedSave:
        """Return the step and the id of a save: `step` where it is given, else the largest next_step of all ranks.

        error: why this rank cannot begin; it is raised here, and a ConflictError on the other ranks. Ranks that cannot
        talk to each other must be told both, the same on each of them. Raises UsageError.
        """
        if self._world_size > 1 and not is_distributed():
            if error is not None:
                raise error
            return _told(step, save_id, world_size=self._world_size)
        if error is None and save_id is not None:
            error = UsageError("save_id is not the caller's to choose here", found=save_id, hint="leave it out")
        given = -1 if step is None else step
        next_max, given_max, given_negated_max = self.vote("begin to save", error, (next_step, given, -given))
        if given_max != -given_negated_max:
            raise UsageError("ranks were told to save different steps", found=(-given_negated_max, given_max))
        return AgreedSave(step=next_max if given_max < 0 else given_max, save_id=self._common_id())

    def vote(self, what: str, error: Exception | None, numbers: Sequence[int] = ()) -> list[int]:
        """Return the largest of every number over all ranks, when no rank comes with an error.

        Raises error; ConflictError when another rank came with one; IOFailedError when the ranks cannot talk.
        """
        if not self._can_talk():
            if error is not None:
                raise error
            return list(numbers)
        ballot = torch.tensor([0 if error is None else self._rank + 1, *numbers], dtype=torch.int64)
        try:
            dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self._own_group())
        except RuntimeError as failure:
            if error is not None:
                raise error from failure
            raise IOFailedError(f"ranks could not agree to {what}: {failure}") from failure
        if error is not None:
            raise error
        failed, *agreed = ballot.tolist()
        if failed:
            raise ConflictError(f"rank {failed - 1} could not {what}", hint="its own error says why")
        return agreed

    def close(self) -> None:
        """Forget the group; it ends with torch.distributed."""
        self._group = self._made_within = None

    def _can_talk(self) -> bool:
        if self._world_size == 1 or not is_distributed():
            return False
        if (dist.get_rank(), dist.get_world_size()) != (self._rank, self._world_size):
            raise UsageError(
                "torch.distributed was initialised anew with other ranks",
                found=(dist.get_rank(), dist.get_world_size()),
                expected=(self._rank, self._world_size),
                hint="make a new Saver",
            )
        return True

    def _common_id(self) -> str:
        """Return 16 random bytes of rank 0, in hexadecimal."""
        drawn = torch.frombuffer(bytearray(os.urandom(SAVE_ID_BYTES)), dtype=torch.uint8)
        if self._can_talk():
            try:
                dist.broadcast(drawn, src=0, group=self._own_group())
            except RuntimeError as failure:
                raise IOFailedError(f"ranks could not agree on a save id: {failure}") from failure
        return bytes(drawn.tolist()).hex()

    def _own_group(self) -> Any:
        if not dist.is_gloo_available():
            raise UnsupportedError("this torch has no gloo, over which ranks agree")
        if self._made_within is not dist.group.WORLD:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._deadline_s))
            self._made_within = dist.group.WORLD
        return self._group


def _told(step: int | None, save_id: str | None, *, world_size: int) -> AgreedSave:
    if step is None or not isinstance(save_id, str) or not 1 <= len(save_id) <= 2 * SAVE_ID_BYTES:
        raise UsageError(
            f"{world_size} ranks cannot agree on a step and a save id without torch.distributed",
            found=f"step={step!r}, save_id={save_id!r}",
            expected="both, the same on every rank, and save_id different for every save",
            hint="initialise torch.distributed, or give save(..., step=..., save_id=...)",
        )
    return AgreedSave(step=step, save_id=save_id)
