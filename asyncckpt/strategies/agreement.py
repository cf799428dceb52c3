"""Whether an async call has ended on all ranks: one answer for all of them, whenever they ask.

Ranks ask in rounds. All ranks ask about the same calls in the same order, and equally often, so the rounds of a call
have the same numbers everywhere. In every round

1. a rank whose call has ended, well or not, tells rank 0, once;
2. rank 0 takes note of what has come, decides, and leaves the answer under the number of the round;
3. the others take the answer from there.

So no rank finalizes a call in a round in which another one does not: finalize functions may talk to each other. Rank 0
waits for nobody unless the round is a blocking one, the others for rank 0. Whoever waits long says so four times per
deadline (`say_running`); a rank of which nothing is heard for a whole deadline is taken for dead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from asyncckpt.coordination.channel import Channel
from asyncckpt.errors import DeadlineError, PeerError
from asyncckpt.format.fields import Fields
from asyncckpt.format.strict_json import dumps, loads

_CAUSE_CHARACTERS_MAX = 2000


@dataclass(frozen=True)
class Failure:
    """A call failed on a rank, and why."""

    rank: int
    cause: str


@dataclass(frozen=True)
class Verdict:
    """What becomes of a call. running: it has not ended everywhere (or on the rank that says so); else see failure."""

    running: bool
    failure: Failure | None = None


_RUNNING = Verdict(running=True)
_DONE = Verdict(running=False)


class Agreement:
    """One rank's part in it, used by one thread. deadline_s: how long another rank may be silent when it is needed."""

    def __init__(self, channel: Channel, *, deadline_s: float) -> None:
        self._channel = channel
        self._deadline_s = deadline_s
        self._call = -1
        self._round = 0
        self._told = False
        self._missing: set[int] = set()
        self._failure: Failure | None = None

    @property
    def rank(self) -> int:
        return self._channel.rank

    @property
    def pause_s(self) -> float:
        """How long a rank may wait without a word."""
        return self._deadline_s / 4

    def say_running(self, call: int) -> None:
        """Let the others know that this rank lives, while it waits for its own call to end."""
        self._begin(call)
        self._channel.send(call, None if self.rank == 0 else 0, _encode(_RUNNING))

    def decide(self, call: int, *, ended: bool, failure: Failure | None, blocking: bool) -> Verdict:
        """The next round about a call, whose numbers ascend. ended, failure: how it stands with it on this rank.

        blocking: rank 0 waits until the call has ended everywhere; all ranks say the same. Raises PeerError when a rank
        is silent for too long or the channel is gone.
        """
        assert ended or failure is None, "a call that failed has ended"
        self._begin(call)
        number, self._round = self._round, self._round + 1
        if self.rank == 0:
            verdict = self._decided(call, Verdict(running=not ended, failure=failure), blocking=blocking)
            self._channel.put(call, _name(number), _encode(verdict))
            return verdict
        if ended and not self._told:
            self._told = True
            self._channel.send(call, 0, _encode(Verdict(running=False, failure=failure)))
        return self._taken(call, _name(number))

    def close(self) -> None:
        """End the channel."""
        self._channel.close()

    def _begin(self, call: int) -> None:
        if call == self._call:
            return
        assert call > self._call, "calls are finalized in their order"
        if self._call > 0 and self.rank == 0:
            # Nobody reads its rounds any longer: whoever has told of the call behind it had ended it.
            self._channel.forget(self._call - 1)
        self._call, self._round, self._told = call, 0, False
        self._missing, self._failure = set(range(self._channel.ranks_count)), None

    def _taken(self, call: int, name: str) -> Verdict:
        """Rank 0's answer, waited for as long as rank 0 is heard of."""
        heard = time.monotonic()
        while True:
            try:
                return _decode(self._channel.get(call, name, self.pause_s), rank=0)
            except DeadlineError as error:
                if self._channel.receive(call, 0.0):
                    heard = time.monotonic()
                elif time.monotonic() - heard >= self._deadline_s:
                    what = f"rank 0 does not say whether async call {call} is done"
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
                self._take(sender, _decode(raw, rank=sender))
            if not blocking:
                if not messages:
                    return _RUNNING
                continue
            if now - said >= self.pause_s:
                said = now
                self.say_running(call)
            silent = [rank for rank in self._missing if now - heard[rank] >= self._deadline_s]
            if silent:
                self._failure = Failure(rank=min(silent), cause=f"no word for {self._deadline_s} s")
        return _DONE if self._failure is None else Verdict(running=False, failure=self._failure)

    def _take(self, rank: int, told: Verdict) -> None:
        if not told.running:
            self._missing.discard(rank)
            self._failure = self._failure or told.failure


def _name(number: int) -> str:
    return f"round-{number}"


def _encode(verdict: Verdict) -> bytes:
    failure = verdict.failure
    if failure is None:
        return dumps({"running": verdict.running})
    # An error may tell a name that is no valid Unicode.
    cause = failure.cause[:_CAUSE_CHARACTERS_MAX].encode("utf-8", "replace").decode("utf-8")
    return dumps({"running": False, "rank": failure.rank, "cause": cause})


def _decode(raw: bytes, *, rank: int) -> Verdict:
    owner = f"message of rank {rank} about an async call"
    fields = Fields(loads(raw, owner=owner), owner=owner, where="message")
    if fields.absent("rank"):
        return _RUNNING if fields.flag("running", default=False) else _DONE
    return Verdict(running=False, failure=Failure(rank=fields.integer("rank"), cause=fields.text("cause")))
