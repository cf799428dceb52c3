"""Places of a save at which a rank kills (or stops) itself: functions of the engine are replaced in its own process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from asyncckpt.commit.attempt import Claim
from asyncckpt.commit.transaction import Transaction
from asyncckpt.coordination.file_channel import FileChannel
from asyncckpt.coordination.messages import Begin, Outcome, Prepared, decode
from asyncckpt.coordination.store_channel import StoreChannel
from asyncckpt.engine.features import chosen_blocks
from asyncckpt.engine.ranks import rank_save
from asyncckpt.engine.ranks.rank_save import RankSave
from asyncckpt.engine.save import stage
from asyncckpt.engine.save import start_save as save
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.format.names import Attempt

FLUSH_S_MAX = 20.0
# In the order of a save. Rank 0 tells itself nothing over the channel.
OF_PARTICIPANT = ("plan", "capture", "begun", "filter", "write", "written", "before prepared", "prepared")
OF_COORDINATOR = (
    *("plan", "capture", "folder", "folder made", "filter", "write", "written"),
    *("before commit", "manifest written", "renamed", "durable", "told"),
)
_FUNCTIONS: dict[str, tuple[Any, str]] = {
    "plan": (save, "choose_stage"),
    "capture": (stage, "capture"),
    "filter": (chosen_blocks, "filter_blocks"),
    "write": (rank_save, "write_files"),
    "written": (rank_save, "write_files"),
    "folder": (Transaction, "begin"),
    "folder made": (Transaction, "begin"),
    "before commit": (RankSave, "publish"),
    "manifest written": (Transaction, "_give_name"),
    "renamed": (Transaction, "_give_name"),
    "durable": (Transaction, "_make_durable"),
}
_AFTERWARDS = ("written", "folder made", "renamed", "durable")
_MESSAGES: dict[str, type[Begin | Prepared | Outcome]] = {
    "begun": Begin,
    "before prepared": Prepared,
    "prepared": Prepared,
    "told": Outcome,
}


def strike_at(point: str, signal_number: int, *, step: int) -> None:
    """Send this process a signal when it comes to a point of the save of a step, which is the next one to begin."""
    if point in _MESSAGES:
        for channel in (StoreChannel, FileChannel):
            _strike_at_message(channel, point, signal_number, step=step)
        return
    owner, name = _FUNCTIONS[point]
    function = getattr(owner, name)

    @functools.wraps(function)
    def striking(*arguments: Any, **options: Any) -> Any:
        # The save before this one may still be in flight.
        steps = {argument.step for argument in arguments if isinstance(argument, (SaveJob, Attempt, Claim))}
        steps |= {argument.attempt.step for argument in arguments if isinstance(argument, Transaction)}
        is_it = steps <= {step}
        if is_it and point not in _AFTERWARDS:
            os.kill(os.getpid(), signal_number)
        result = function(*arguments, **options)
        if is_it and point in _AFTERWARDS:
            os.kill(os.getpid(), signal_number)
        return result

    setattr(owner, name, striking)


def _strike_at_message(channel: Any, point: str, signal_number: int, *, step: int) -> None:
    """Right before a message is sent, or when it has left this process."""
    send: Callable[..., None] = channel.send

    @functools.wraps(send)
    def striking(self: Any, call: int, to: int | None, message: bytes) -> None:
        said = decode(message, sender=self.rank)
        is_it = isinstance(said, _MESSAGES[point]) and step == _step_of(said)
        if is_it and point.startswith("before"):
            os.kill(os.getpid(), signal_number)
        send(self, call, to, message)
        if is_it and not point.startswith("before"):
            if isinstance(self, StoreChannel):
                assert self._line.ask(lambda store: store.add("settled", 0)).wait(FLUSH_S_MAX)
            os.kill(os.getpid(), signal_number)

    channel.send = striking


def _step_of(message: Any) -> int | None:
    if isinstance(message, Begin):
        return message.step
    return None if message.attempt is None else int(message.attempt.step)
