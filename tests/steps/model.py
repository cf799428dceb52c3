"""What the saves of a training have to hold, and for what one may be refused.

Copies of the state at each call, and which memory of it is open until a step asks for it, as decision 0030 says.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from tests.devices.training import differing
from tests.steps.trainings import RandomTraining, kept_by, leaves_of, local, parameters_of

Optimizer = torch.optim.Optimizer
Memory = tuple[int, int]


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return where a tensor begins, and behind its last element."""
    own = local(tensor)
    if not own.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(own.shape, own.stride(), strict=True))
    return own.data_ptr(), own.data_ptr() + (last + 1) * own.itemsize


def overlap(one: Memory, other: Memory) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def written_by(optimizer: Optimizer) -> list[torch.Tensor]:
    return [*parameters_of(optimizer), *kept_by(optimizer)]


@dataclass
class Watched:
    """A tensor of a save that is copied behind the call. owners: the optimizers that have it, one of which asks for it.

    counters: what has the counts of all that lie over its memory, of the state and of optimizers.
    """

    memory: Memory
    owners: set[int]
    counters: list[torch.Tensor]
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = self.now()

    def now(self) -> list[int]:
        return [item._version for item in self.counters]


@dataclass
class Save:
    """What a save has to hold. changed: what was written otherwise while it was open.

    uncounted: what was written through a parameter to which another one's memory was given: torch counts none of it.
    """

    path: Path
    number: int
    values: dict[str, Any]
    watched: dict[str, Watched]
    changed: set[str] = field(default_factory=set)
    uncounted: set[str] = field(default_factory=set)
    is_cancelled: bool = False
    future: asyncckpt.SaveFuture = field(init=False)


def watched_in(state: Any, listed: Iterable[Optimizer]) -> dict[str, Watched]:
    """Return what of a state is copied behind the call, as decision 0030 says."""
    owned = [(memory_of(tensor), id(item), tensor) for item in listed for tensor in written_by(item)]
    found = {}
    for name, leaf in leaves_of(state):
        if isinstance(leaf, torch.Tensor) and leaf.numel() and local(leaf).is_contiguous():
            begin, end = memory_of(leaf)
            over = [(owner, tensor) for memory, owner, tensor in owned if memory[0] == begin and memory[1] >= end]
            if over:
                tensors = [leaf, *(tensor for _, tensor in over)]
                counters = [item.detach() for tensor in tensors for item in (tensor, local(tensor))]
                found[name] = Watched((begin, end), {owner for owner, _ in over}, counters)
    return found


class InterruptedStep(Exception):
    """What a handler of a signal raises while a step waits."""


class SavesOfTraining:
    """The saves of one training. counts: what happened.

    raised: errors of earlier saves, from calls on their Saver. exchanged: parameters that have another one's memory.
    """

    def __init__(self, training: RandomTraining, counts: Counter[str]) -> None:
        self.training, self.counts = training, counts
        self.saves: list[Save] = []
        self.raised: list[BaseException] = []
        self.exchanged: set[int] = set()
        self.steps_count = 0  # How many steps are within each other now.

    @property
    def is_open(self) -> bool:
        return any(save.watched for save in self.saves)

    def call(self, saver: asyncckpt.Saver, state: Any, listed: Iterable[Optimizer]) -> None:
        """Make the next save."""
        values = {name: taken(leaf) for name, leaf in leaves_of(state)}
        watched = {} if self.steps_count else watched_in(state, listed)
        self.counts["saved within a step"] += self.steps_count > 0
        save = Save(Path(saver.path), len(self.saves) + 1, values, watched)
        for _ in range(len(self.saves) + 1):
            try:
                save.future = saver.save_async(save.number)
                break
            except asyncckpt.UsageError as error:  # Of an earlier one that was refused, which is looked at, too.
                self.raised.append(error)
        assert hasattr(save, "future"), self.raised
        self.saves.append(save)

    def note_shared(self) -> None:
        """Note what has moved as a part of the flat tensor: all views of one tensor count as one.

        Where parameters have exchanged their memory, such views may lie anywhere.
        """
        flat = self.training.flat.untyped_storage().data_ptr()
        self.note(None if self.exchanged else flat)

    def note(self, storage: int | None = None) -> None:
        """Note whose counters have moved: a save that has it open may be refused for it. storage: only in this one."""
        for save in self.saves:
            for name, watched in save.watched.items():
                is_there = any(local(item).untyped_storage().data_ptr() == storage for item in watched.counters)
                if watched.now() != watched.counts and (is_there or storage is None):
                    save.changed.add(name)

    def close(self, optimizer: Optimizer) -> None:
        """Note which memory a step has waited for: all of each optimizer that has some which the step writes."""
        written = [memory_of(tensor) for tensor in written_by(optimizer)]
        for save in self.saves:
            reached = {
                name
                for name, watched in save.watched.items()
                if any(overlap(watched.memory, memory) for memory in written)
            }
            owners = [save.watched[name].owners for name in reached]
            closed = {id(optimizer)}.union(*(own for own in owners if len(own) == 1))
            for name in list(save.watched):
                if name in reached or save.watched[name].owners <= closed:
                    del save.watched[name]

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Step: what it writes is closed before, but not by one that a signal has ended."""
        before = [(save, dict(save.watched)) for save in self.saves]
        self.close(optimizer)
        self.steps_count += 1
        try:
            yield
        except InterruptedStep:
            for save, watched in before:
                save.watched = watched
            raise
        finally:
            self.steps_count -= 1
            self.note_shared()

    @contextmanager
    def writing(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Write to tensors otherwise than by a step."""
        before = [{name: watched.now() for name, watched in save.watched.items()} for save in self.saves]
        yield
        self.note()
        memories = [memory_of(tensor) for tensor in tensors if id(tensor) in self.exchanged]
        for save, counts in zip(self.saves, before, strict=True):
            save.uncounted |= {
                name
                for name, watched in save.watched.items()
                if watched.now() == counts[name] and any(overlap(watched.memory, memory) for memory in memories)
            }

    def check(self) -> list[str]:
        """Return what is wrong in any checkpoint, or with any refusal."""
        found = []
        for save in self.saves:
            error = save.future.exception(60)
            if isinstance(error, asyncckpt.SaveCancelledError) and save.is_cancelled:
                self.counts["cancelled"] += 1
                continue
            self.counts["refused" if error else "committed"] += 1
            self.counts["uncounted"] += bool(save.uncounted)
            if error is None:
                loaded = dict(leaves_of(asyncckpt.load(save.path, step=save.number)))
                wrong = [name for name in unlike(loaded, save.values) if name not in save.uncounted]
                found += [f"{name} of step {save.number}" for name in wrong]
            elif not isinstance(error, asyncckpt.UsageError) or not any(
                f"{name!r} was changed between save_async" in str(error) for name in save.changed
            ):
                found.append(f"step {save.number} was refused: {error}; changed were {sorted(save.changed)}")
        errors = [save.future.exception(60) for save in self.saves]
        unknown = [error for error in self.raised if error not in errors or self.raised.count(error) > 1]
        return found + [f"raised by a call, or more than once: {error}" for error in unknown]


def taken(leaf: Any) -> Any:
    return local(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def unlike(loaded: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Return the names of what a checkpoint does not hold as it was."""
    if loaded.keys() != values.keys():
        return sorted(loaded.keys() ^ values.keys())
    tensors = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
    others = [name for name in values if name not in tensors and loaded[name] != values[name]]
    return others + differing(
        {name: local(loaded[name]).detach() for name in tensors}, {name: values[name] for name in tensors}
    )
