"""What everybody said and was told, and the promises that must hold of it."""

from __future__ import annotations

from collections import Counter, defaultdict

from asyncckpt.coordination.messages import AttemptMessage, Message, Outcome, Prepared
from tests.simulator.disk import Disk, Violation
from tests.simulator.schedule import DISK_SECONDS_MAX, LIMITS, JobSchedule

# A call ends within its limits and, after these, one effect of a slow disk in up to two parts.
CALL_SECONDS_MAX = LIMITS.begin_s + LIMITS.save_s + LIMITS.silence_s + 2 * DISK_SECONDS_MAX


class Record:
    """Checks what can be checked at once; `check` checks the rest at the end."""

    def __init__(self, schedule: JobSchedule, disk: Disk) -> None:
        self._schedule, self._disk = schedule, disk
        self._begun: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._paused_s: dict[tuple[int, int], float] = {}
        self._outcomes: defaultdict[int, dict[int, Outcome]] = defaultdict(dict)
        self._decisions: dict[int, Outcome] = {}
        self._told: set[tuple[str, int]] = set()
        self._prepared: set[tuple[str, int]] = set()
        self.endings: Counter[str] = Counter()

    def begun(self, rank: int, call: int, now: float, *, paused_s: float) -> None:
        self._begun[call][rank] = now
        self._paused_s[call, rank] = paused_s

    def told(self, rank: int, message: Message) -> None:
        if isinstance(message, AttemptMessage):
            self._told.add((message.attempt.id, rank))

    def said(self, rank: int, call: int, to: int, message: Message) -> None:
        if isinstance(message, Prepared):
            if rank and (message.attempt.id, rank) not in self._told:
                raise Violation(f"rank {rank} is prepared for an attempt that it was not told")
            if rank in self._outcomes[call]:
                raise Violation(f"rank {rank} says that it is prepared after its call {call} has ended")
            self._prepared.add((message.attempt.id, rank))
        if isinstance(message, Outcome) and self._decisions.setdefault(call, message) != message:
            raise Violation(f"call {call} was decided twice: {self._decisions[call]}, {message}")

    def wrote_kind(self, call: int, message: AttemptMessage) -> None:
        behaviours = [self._schedule.behaviour(rank, call) for rank in range(self._schedule.ranks_count)]
        expected = "delta" if any(behaviour.kind == "delta" for behaviour in behaviours) else "full"
        if message.kind != expected:
            raise Violation(f"call {call} is a save of kind {message.kind}, expected {expected}")

    def ended(self, rank: int, call: int, outcome: Outcome, now: float, paused_s: float) -> None:
        self._outcomes[call][rank] = outcome
        is_found = outcome.state == "committed" and not outcome.notes
        self.endings["found" if is_found else outcome.state] += 1
        seconds = now - self._begun[call][rank] - (paused_s - self._paused_s[call, rank])
        if seconds > CALL_SECONDS_MAX:
            raise Violation(f"call {call} of rank {rank} took {seconds:.1f} s, expected {CALL_SECONDS_MAX} at most")

    def check(self, *, alive: set[int]) -> None:
        """The end: nothing happens any more."""
        for call in sorted(self._begun):
            self._check_ends(call, alive)
            self._check_one_outcome(call)
            self._check_manifests(call)
            self._check_contradictions(call)

    def _check_ends(self, call: int, alive: set[int]) -> None:
        hanging = sorted(rank for rank in self._begun[call] if rank in alive and rank not in self._outcomes[call])
        if hanging:
            raise Violation(f"call {call} never ends on ranks {hanging}")
        if self._schedule.profile == "calm" and not self._schedule.repeats_step:
            others = {rank: outcome for rank, outcome in self._outcomes[call].items() if outcome.state != "committed"}
            if others or len(self._outcomes[call]) != self._schedule.ranks_count:
                raise Violation(f"nothing went wrong, and call {call} has not committed: {others}")

    def _check_one_outcome(self, call: int) -> None:
        """Doubt goes with everything; nothing else goes with its opposite."""
        states = {rank: outcome.state for rank, outcome in sorted(self._outcomes[call].items())}
        committed = {rank for rank, state in states.items() if state == "committed"}
        not_committed = {rank for rank, state in states.items() if state in ("aborted", "skipped")}
        if committed and not_committed:
            raise Violation(f"call {call} has two outcomes: {states}")

    def _check_manifests(self, call: int) -> None:
        published = [id for id in self._disk.manifests.values() if self._disk.calls[id] == call]
        for rank, outcome in sorted(self._outcomes[call].items()):
            if outcome.state == "committed":
                assert outcome.attempt is not None
                if published != [outcome.attempt.id]:
                    raise Violation(f"rank {rank} was told that call {call} has committed, but it is not there")
            elif outcome.state != "in_doubt" and published:
                raise Violation(f"rank {rank} was told {outcome.state} of call {call}, but it is there")
        for id in published:
            unprepared = [rank for rank in range(1, self._schedule.ranks_count) if (id, rank) not in self._prepared]
            if unprepared:
                raise Violation(f"call {call} was committed without ranks {unprepared}")

    def _check_contradictions(self, call: int) -> None:
        behaviours = [self._schedule.behaviour(rank, call) for rank in range(self._schedule.ranks_count)]
        is_wanted = len({(it.what, it.step_offset, it.fact) for it in behaviours}) == 1 and behaviours[0].what == "save"
        if not is_wanted and any(self._disk.calls[id] == call for id in self._disk.manifests.values()):
            raise Violation(f"call {call} was committed, but not all ranks wanted to save the same")
