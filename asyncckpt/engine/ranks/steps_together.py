"""What ranks say to each other beside their saves: which step all of them restore, and after which all of them stop.

All of it is left on the channel under a call that is never forgotten.

To restore:

1. Rank 0 chooses the step; the others wait for its word.
2. Every rank does its part, and reports to rank 0, whose next word lets all go on.
3. A rank that leaves the restore by an error says that it has failed: rank 0 in its next word, the others to rank 0,
   which then fails, too.
4. A rank that has got SIGTERM says that it was asked, and goes on; the next word of rank 0 says whether any was, and
   all end together. If its process is to end, it waits for the others no longer than ASKED_S_MAX: some may be gone.

To stop: all ranks count their steps alike, and one that is asked to stop in step n leaves the word that all stop in
step n + 1. In synchronous training no rank ends that step before this one has begun it, after its word, so all find the
word there and none has passed it. Ranks that are asked in the same step say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TypeVar, cast

from asyncckpt.coordination.messages import bounded, cause_of
from asyncckpt.engine.process.termination import Termination
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.errors import CheckpointError, ConflictError, DeadlineError, PeerError
from asyncckpt.format.strict_json import Fields, Json, dumps, loads
from asyncckpt.options import RESTORE_DEADLINE_S

STANDING = 10**11  # Above the numbers of all calls.
LOOK_S = 0.5  # Between two looks for what else may have come than what is waited for.
ASKED_S_MAX = 10.0  # Below the 30 seconds that launchers leave between SIGTERM and SIGKILL.
ASKED, FAILED = "asked", "failed"
T = TypeVar("T")


class StepsTogether:
    """One rank's part in it; with one rank everything is decided here. All ranks call everything alike."""

    def __init__(self, ranks: Ranks | None, termination: Termination, path: object = "") -> None:
        self._ranks, self._path = ranks, str(path)
        self._termination = termination
        self._steps_count = 0
        self._stops_count = 0
        self._restores_count = 0
        self._words_count = 0  # Of rank 0 in this restore.
        self._is_any_asked = False

    @property
    def steps_to_stop(self) -> int:
        """How many more steps all ranks make when none asks to stop now, and one does at the end of the next step."""
        return 1 if self._ranks is None else 2

    def stop(self, asked: str) -> str:
        """Return why all ranks stop after the step that has just ended, "" if they do not. asked: why this rank would.

        PeerError when rank 0 is gone.
        """
        ranks = self._ranks
        if ranks is None:
            return asked
        self._steps_count += 1
        name = f"stop/{self._stops_count}"
        found = self._find(ranks, name)
        if found is None and asked:
            with suppress(ConflictError):  # Another rank has just said it.
                ranks.channel.put(STANDING, name, dumps({"step": self._steps_count + 1, "why": asked}))
            found = self._find(ranks, name)  # Now it is there, for all ranks.
        if found is None or found.integer("step") > self._steps_count:
            return ""
        self._stops_count += 1
        return found.text("why")

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore in this block; an error that leaves it is one of all ranks."""
        ranks = self._ranks
        self._restores_count += 1
        self._words_count, self._is_any_asked = 0, False
        try:
            yield
        except BaseException as error:
            if ranks is not None:
                rank = error.rank if isinstance(error, PeerError) else ranks.rank
                name = self._next_word() if ranks.is_coordinator else FAILED
                with suppress(CheckpointError):  # The channel is gone, and so are those who would hear of it.
                    cause = error.cause if isinstance(error, PeerError) else cause_of(error)
                    self._put(ranks, name, {"rank": rank, "cause": cause})
            if isinstance(error, PeerError) and self._path not in error.what:
                what = f"nothing was restored from {self._path!r}"
                raise PeerError(what, rank=error.rank, cause=error.what, hint=error.hint) from None
            raise

    @property
    def is_asked(self) -> bool:
        """Whether SIGTERM had come to any rank when rank 0 spoke last: all say the same."""
        return self._termination.is_asked if self._ranks is None else self._is_any_asked

    def decided(self, decide: Callable[[], Json]) -> Json:
        """Return what rank 0 decides; PeerError on the others where that has failed."""
        ranks = self._ranks
        if ranks is None:
            return decide()
        return self._say(ranks, decide()) if ranks.is_coordinator else self._hear(ranks)

    def all_done(self, work: Callable[[], T]) -> T:
        """Do this rank's part and return when all ranks have done theirs; PeerError when another one has failed."""
        return cast("T", self.all_tried(work, ())[0])

    def all_tried(self, work: Callable[[], T], caught: type[CheckpointError] | tuple[()]) -> tuple[T | None, str]:
        """Do this rank's part, as above; return what it returns, and which error was caught on any rank, as text."""
        ranks, result, why = self._ranks, None, ""
        try:
            result = work()
        except caught as error:
            why = bounded(error.what)
        if ranks is None:
            return result, why
        name = f"{self._words_count}/done"
        if ranks.is_coordinator:
            for rank in range(1, ranks.ranks_count):
                text = self._get(ranks, f"{name}/{rank}", rank).optional_text("why")
                why = why or (f"rank {rank}: {text}" if text else "")
            self._say(ranks, why)
        else:
            self._say_if_asked(ranks)
            self._put(ranks, f"{name}/{ranks.rank}", {"why": why} if why else {})
            why = str(self._hear(ranks))
        return result, why

    def _say(self, ranks: Ranks, decision: Json) -> Json:
        self._check_failed(ranks)
        self._is_any_asked = self._termination.is_asked or self._said(ASKED) is not None
        self._put(ranks, self._next_word(), {"decision": decision, "asked": self._is_any_asked})
        return decision

    def _hear(self, ranks: Ranks) -> Json:
        word = self._get(ranks, self._next_word(), 0)
        _check_done(word)
        self._is_any_asked = word.flag("asked", default=False)
        return word.value("decision")

    def _next_word(self) -> str:
        self._words_count += 1
        return f"{self._words_count}"

    def _check_failed(self, ranks: Ranks) -> None:
        """Raise, on rank 0, the PeerError of another rank that has left the restore."""
        failed = self._said(FAILED) if ranks.is_coordinator else None
        if failed is not None:
            _check_done(failed)

    def _say_if_asked(self, ranks: Ranks) -> None:
        if self._termination.is_asked and not ranks.is_coordinator and self._said(ASKED) is None:
            self._put(ranks, ASKED, {})

    def _get(self, ranks: Ranks, name: str, rank: int) -> Fields:
        """Wait for what a rank says in this restore."""
        begin = monotonic()
        seconds = RESTORE_DEADLINE_S
        while True:
            if self._termination.is_asked:
                self._say_if_asked(ranks)
                if self._termination.ends_process:
                    seconds = min(seconds, monotonic() - begin + ASKED_S_MAX)
            left_s = begin + seconds - monotonic()
            try:
                return _fields(ranks.channel.get(STANDING, self._key(name), max(0.0, min(left_s, LOOK_S))))
            except DeadlineError as error:
                self._check_failed(ranks)
                if left_s <= LOOK_S:
                    cause = f"rank {rank} has said nothing for {seconds:g} s"
                    raise PeerError("no word about what is restored", rank=rank, cause=cause) from error

    def _said(self, name: str) -> Fields | None:
        """Return what any rank has said in this restore."""
        return None if self._ranks is None else self._find(self._ranks, self._key(name))

    def _put(self, ranks: Ranks, name: str, word: Json) -> None:
        with suppress(ConflictError):  # Another rank has just said it.
            ranks.channel.put(STANDING, self._key(name), dumps(word))

    def _key(self, name: str) -> str:
        return f"restore/{self._restores_count}/{name}"

    def _find(self, ranks: Ranks, name: str) -> Fields | None:
        raw = ranks.channel.find(STANDING, name, ranks.limits.silence_s)
        return None if raw is None else _fields(raw)


def _check_done(word: Fields) -> None:
    """Raise the error of a rank that has said one."""
    cause = word.optional_text("cause")
    if cause is not None:
        rank = word.optional_integer("rank")
        who = "a rank" if rank is None else f"rank {rank}"
        raise PeerError(f"{who} cannot restore", rank=rank, cause=cause)


def _fields(raw: bytes) -> Fields:
    owner = "what ranks say about a step"
    return Fields(loads(raw, owner=owner), owner=owner, where="message")
