"""Whether a call has ended on all ranks, and how: one answer for all of them, whenever they ask.

Ranks ask in rounds. All ranks ask about the same calls in the same order, and equally often, so the rounds of a call
have the same numbers everywhere. In every round

1. a rank whose call has ended, well or not, reports it to rank 0, a single time;
2. rank 0 takes note of what has come, decides, and leaves the answer under the number of the round;
3. the others take the answer from there.

So no rank finalizes a call in a round in which another one does not: finalize functions may talk to each other. Rank 0
waits for nobody unless the round is a blocking one, the others for rank 0. A rank that waits long reports it four times
per deadline (`say_running`); a rank of which nothing is heard for a whole deadline is taken for dead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.messages import cause_of
from asyncckpt.errors import DeadlineError, PeerError
from asyncckpt.format.strict_json import Fields, dumps, loads
from asyncckpt.model.own_rank import own_rank

CALLS_PEER_DEADLINE_S = 600.0  # A rank may train for long before it asks for what another one waits.


@dataclass(frozen=True)
class Verdict:
    """What becomes of a call. running: it has not ended everywhere (or on the rank that reports).

    rank, cause: where it has failed, and why. result: that of the reporting rank; all ranks must have the same.
    """

    running: bool = False
    rank: int | None = None
    cause: str = ""
    result: str = ""

    def encode(self) -> bytes:
        return dumps({name: value for name, value in vars(self).items() if value not in (None, "")})

    @staticmethod
    def decode(raw: bytes, *, sender: int) -> Verdict:
        """CorruptError for what `encode` did not make."""
        owner = f"message of rank {sender} about a call"
        fields = Fields(loads(raw, owner=owner), owner=owner, where="message")
        rank = fields.optional_integer("rank")
        return Verdict(
            running=fields.flag("running", default=False),
            rank=rank,
            cause="" if rank is None else fields.text("cause"),
            result=fields.optional_text("result") or "",
        )


_RUNNING = Verdict(running=True)


class Agreement:
    """One rank's part in it, used by one thread. deadline_s: how long another rank may be silent when it is needed."""

    def __init__(self, channel: Channel, *, deadline_s: float) -> None:
        self._channel = channel
        self._deadline_s = deadline_s
        self._call = -1
        self._round = 0
        self._has_reported = False
        self._missing: set[int] = set()
        self._failure: Verdict | None = None
        self._results: dict[int, str] = {}

    @property
    def pause_s(self) -> float:
        """How long a rank may wait without a word."""
        return self._deadline_s / 4

    def say_running(self, call: int) -> None:
        """Let the others know that this rank lives, while it waits for its own call to end."""
        self._begin(call)
        self._channel.send(call, None if self._channel.rank == 0 else 0, _RUNNING.encode())

    def is_done(
        self, call: int, what: str, *, ended: bool, error: BaseException | None, blocking: bool, result: str = ""
    ) -> bool:
        """Return whether a call has ended on all ranks. what: its name in errors. error, result: this rank's own.

        Raises error, or PeerError when the call failed on another rank, or ended there with another result.
        """
        own = Verdict(running=not ended, result=result)
        if error is not None:
            own = Verdict(rank=self._channel.rank, cause=cause_of(error))
        try:
            verdict = self.decide(call, own, blocking=blocking)
        except Exception as lost:
            if error is not None:
                raise error from lost
            raise
        if error is not None and not verdict.running:
            raise error
        if verdict.rank is not None:
            raise PeerError(f"{what} failed on rank {verdict.rank}", rank=verdict.rank, cause=verdict.cause)
        return not verdict.running

    def decide(self, call: int, own: Verdict, *, blocking: bool) -> Verdict:
        """Take the next round about a call, whose numbers ascend. own: how it stands on this rank.

        blocking: rank 0 waits until the call has ended everywhere; all ranks say the same. Raises PeerError when a rank
        is silent for too long or the channel is gone.
        """
        assert not own.running or own.rank is None, "a call that failed has ended"
        self._begin(call)
        number, self._round = self._round, self._round + 1
        if self._channel.rank == 0:
            verdict = self._decided(call, own, blocking=blocking)
            self._channel.put(call, _name(number), verdict.encode())
            return verdict
        if not own.running and not self._has_reported:
            self._has_reported = True
            self._channel.send(call, 0, own.encode())
        return self._taken(call, _name(number))

    def close(self) -> None:
        """End the channel."""
        self._channel.close()

    def _begin(self, call: int) -> None:
        if call == self._call:
            return
        assert call > self._call, "calls are finalized in their order"
        if self._call > 0 and self._channel.rank == 0:
            # Nobody reads its rounds any longer: whoever has reported the call behind it had ended it.
            self._channel.forget(self._call - 1)
        self._call, self._round, self._has_reported = call, 0, False
        self._missing, self._failure, self._results = set(range(self._channel.ranks_count)), None, {}

    def _taken(self, call: int, name: str) -> Verdict:
        """Rank 0's answer, waited for as long as rank 0 is heard of."""
        heard = time.monotonic()
        while True:
            try:
                return Verdict.decode(self._channel.get(call, name, self.pause_s), sender=0)
            except DeadlineError as error:
                if self._channel.receive(call, 0.0):
                    heard = time.monotonic()
                elif time.monotonic() - heard >= self._deadline_s:
                    what = f"rank 0 does not say whether call {call} is done"
                    raise PeerError(what, rank=0, cause=f"no word for {self._deadline_s} s") from error

    def _decided(self, call: int, own: Verdict, *, blocking: bool) -> Verdict:
        self._take(0, own)
        now = said = time.monotonic()
        heard = dict.fromkeys(self._missing, now)
        while self._missing and self._failure is None:
            messages = self._channel.receive(call, self.pause_s if blocking else 0.0)
            now = time.monotonic()
            for sender, raw in messages:
                heard[sender] = now
                self._take(sender, Verdict.decode(raw, sender=sender))
            if not blocking:
                if not messages:
                    return _RUNNING
                continue
            if now - said >= self.pause_s:
                said = now
                self.say_running(call)
            silent = [rank for rank in self._missing if now - heard[rank] >= self._deadline_s]
            if silent:
                self._failure = Verdict(rank=min(silent), cause=f"no word for {self._deadline_s} s")
        return self._failure or Verdict()

    def _take(self, rank: int, report: Verdict) -> None:
        if report.running:
            return
        self._missing.discard(rank)
        if report.rank is not None:
            self._failure = self._failure or report
        if self._failure is None:
            self._results[rank] = report.result
            other, result = next(iter(self._results.items()))
            if result != report.result:
                self._failure = Verdict(rank=rank, cause=f"it has {report.result}, rank {other} {result}")


def _name(number: int) -> str:
    return f"round-{number}"


class GroupAgreement:
    """The agreement between the ranks of a process group, opened when it is first asked for.

    process_group  None: the default group, as long as there is one
    deadline       seconds that another rank may be silent when it is needed
    """

    def __init__(self, process_group: Any = None, *, deadline: float | None = None) -> None:
        self._process_group = process_group
        self._deadline_s = CALLS_PEER_DEADLINE_S if deadline is None else float(deadline)
        self._agreement: Agreement | None = None
        self._opened_for: Any = None

    def get(self) -> Agreement | None:
        """Return it, or None for a single rank. Every rank asks alike; PeerError when they do not find each other.

        If torch.distributed was initialised again, the agreement is a new one.
        """
        if own_rank(None, None, self._process_group)[1] == 1:
            return None
        from asyncckpt.coordination.store_channel import open_store_channel

        world = import_module("torch.distributed").group.WORLD
        group = world if self._process_group is None else self._process_group
        if self._agreement is None or self._opened_for is not group:
            self.close()
            channel = open_store_channel(self._process_group, deadline_s=self._deadline_s)
            self._agreement, self._opened_for = Agreement(channel, deadline_s=self._deadline_s), group
        return self._agreement

    def close(self) -> None:
        """End the channel; the next `get` opens another one."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
