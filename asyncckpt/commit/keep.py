"""Which rules of a KeepPolicy keep which checkpoints.

What a rule keeps does not depend on whether what it does not keep is still there. So retention may run after every
save, or once in a while, and prefer no checkpoint to one that an earlier run would have kept.

A checkpoint that was saved half-way counts for none of them: it stays while no newer one is whole. One that is damaged
counts for none either: what each rule keeps is what it would keep without that one.

A clock that jumps only makes runs of hours: a step is kept if it is in other hours than the last one that was kept.
"""

from __future__ import annotations

import calendar
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from asyncckpt.commit.discover import numbers_of
from asyncckpt.errors import CorruptError
from asyncckpt.format.head import CREATED_FORMAT, ManifestHead
from asyncckpt.format.values import decode_value
from asyncckpt.options import HALF_WAY, KeepPolicy

HOUR_S = 3600


HeadOf = Callable[[int], ManifestHead | None]


def kept_by_rules(policy: KeepPolicy, steps: Sequence[int], head_of: HeadOf) -> dict[int, list[str]]:
    """Return the names of the rules that keep a step, of each that any keeps. steps: ascending.

    head_of: None for a step that is damaged. Heads are read only for rules that need them; of their metadata numbers
    are used.
    """
    kept: dict[int, list[str]] = defaultdict(list)
    for name, chosen in (
        ("latest", _latest(policy, steps, head_of)),
        ("every_steps", _of_every_steps(policy, steps, head_of)),
        ("every_hours", _of_every_hours(policy, steps, head_of)),
        ("best", _best(policy, steps, head_of)),
    ):
        for step in chosen:
            kept[step].append(name)
    return kept


def _latest(policy: KeepPolicy, steps: Sequence[int], head_of: HeadOf) -> list[int]:
    """Return the newest steps, not counting those that are half-way, which stay while no newer one is whole."""
    found: list[int] = []
    whole_count = 0
    for step in reversed(steps):
        head = head_of(step)
        if head is None or (_is_half_way(head) and whole_count):
            continue
        found.append(step)
        whole_count += not _is_half_way(head)
        if whole_count == policy.latest:
            break
    return found


def _is_half_way(head: ManifestHead) -> bool:
    return bool(numbers_of(head.metadata).get(HALF_WAY))


def _whole(head: ManifestHead | None) -> ManifestHead | None:
    return None if head is None or _is_half_way(head) else head


def _of_every_steps(policy: KeepPolicy, steps: Sequence[int], head_of: HeadOf) -> list[int]:
    every = policy.every_steps
    runs = [] if every is None else [list(run) for _, run in itertools.groupby(steps, lambda step: step // every)]
    firsts = [next((step for step in run if _whole(head_of(step)) is not None), None) for run in runs]
    return [step for step in firsts if step is not None]


def _of_every_hours(policy: KeepPolicy, steps: Sequence[int], head_of: HeadOf) -> list[int]:
    hours = policy.every_hours
    if hours is None:
        return []

    def run_of(head: ManifestHead) -> Hashable:
        try:
            return calendar.timegm(time.strptime(head.created, CREATED_FORMAT)) // (hours * HOUR_S)
        except ValueError:  # Another writer's form: nobody knows, so it stays.
            return ("step", head.step)

    whole = [head for step in steps if (head := _whole(head_of(step))) is not None]
    return [next(run).step for _, run in itertools.groupby(whole, run_of)]


def _best(policy: KeepPolicy, steps: Sequence[int], head_of: HeadOf) -> list[int]:
    if policy.best is None or policy.metric is None:
        return []
    whole = [head for step in steps if (head := _whole(head_of(step))) is not None]
    found = [(head.step, _metric(head, policy.metric)) for head in whole]
    values = [(value if policy.mode == "min" else -value, step) for step, value in found if value is not None]
    return [step for _, step in sorted(values)[: policy.best]]


def _metric(head: ManifestHead, name: str) -> float | None:
    """Return a number of the metadata of a whole step, if there is one that can be read, and not nan."""
    encoded = numbers_of(head.metadata).get(name)
    try:
        value = None if encoded is None else decode_value(encoded, owner=f"metadata[{name!r}]")
    except CorruptError:  # Another writer's: no load would take it.
        return None
    return None if isinstance(value, bool) or (isinstance(value, float) and math.isnan(value)) else value
