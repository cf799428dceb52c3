"""Saves whose tensors change what they are, at any place of the call, and change back.

A place is an instruction where Python may let another thread, a signal handler or a finalizer run
(tests/interrupts/places.py): behind each call, so also behind each wait, each native call that gives up the interpreter
lock, each touch of memory and each lock. At a place drawn by a seed, some tensors of the state get another size, dtype,
strides, memory, or become negated views; at a later one, or after the call, they get what they had. Then each save
holds, tensor by tensor, what one of them was during the call, or is refused by name; and the saves after it hold the
state.
"""

from __future__ import annotations

import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import asyncckpt
from asyncckpt.dcp import AsyncStager
from asyncckpt.engine.save import run_save, save_job
from asyncckpt.staging.pool import pool
from tests.interrupts.places import Place, act_at, places_of
from tests.worlds.arenas import close_free
from tests.worlds.bits import bits

WAIT_S_MAX = 60.0
SHAPE = 64, 64  # As large as what steps wait for.
Bits = Mapping[str, tuple[str, tuple[int, ...], bytes]]
FACTS: dict[str, Callable[[float], torch.Tensor]] = {
    "size": lambda value: torch.full((80, 64), value),
    "smaller": lambda value: torch.full((16, 64), value),
    "dtype": lambda value: torch.full(SHAPE, value, dtype=torch.float16),
    "strides": lambda value: torch.full((64, 128), value)[:, ::2],
    "memory": lambda value: torch.full(SHAPE, value),
    "negated": lambda value: torch._neg_view(torch.full(SHAPE, value)),
}


class Finalizer:
    """Runs something when it is collected."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def __del__(self) -> None:
        self._work()


class MovingState:
    """A state, some of which moves: a parameter, a buffer, a tensor by itself and one with strides."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module = torch.nn.Module()
        self.module.moving = torch.nn.Parameter(torch.zeros(SHAPE))
        self.module.staying = torch.nn.Parameter(torch.ones(SHAPE))
        self.module.register_buffer("buffer", torch.zeros(SHAPE))
        self.plain, self.strided = torch.zeros(SHAPE), torch.zeros(SHAPE).t()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.table = asyncckpt.HashTable("t", 4)
        self.table.insert(torch.arange(5), torch.ones(5, 4))
        self.state = {"module": self.module, "plain": self.plain, "strided": self.strided, "n": 1}
        self.kept: list[torch.Tensor] = []
        self.states: list[Bits] = []
        self.value = 0.0
        self.step = 0
        self.move("memory")

    @property
    def moving(self) -> list[torch.Tensor]:
        return [self.module.moving, self.module.get_buffer("buffer"), self.plain]

    def move(self, fact: str) -> None:
        """Let the moving tensors have this fact, and others take the memory that they had."""
        self.value += 1
        for number, tensor in enumerate(self.moving):
            tensor.data = FACTS[fact](self.value + number / 4)
        self.strided.data = FACTS[fact](self.value).t()
        self.kept = [torch.full(SHAPE, -7.0) for _ in range(16)]
        self.states.append(self.bits())

    def bits(self) -> Bits:
        tensors = {**self.module.state_dict(), "plain": self.plain, "strided": self.strided}
        return {name: bits(tensor) for name, tensor in tensors.items()}

    def checkpoint(self) -> Bits:
        found = asyncckpt.load(self.path, step=self.step)
        return {name: bits(tensor) for name, tensor in (*found.pop("module").items(), *found.items()) if name != "n"}


@dataclass(frozen=True)
class Ways:
    """save: makes one. saved: returns what it holds."""

    save: Callable[[], object]
    saved: Callable[[], Bits]

    def next(self) -> Bits:
        self.save()
        return self.saved()


@contextmanager
def by_a_saver(
    world: MovingState, *, is_blocking: bool = False, tables: bool = False, **options: Any
) -> Iterator[Ways]:
    hashtables = {"t": world.table} if tables else None
    with asyncckpt.Saver(
        path=world.path, tensors=world.state, hashtables=hashtables, durability="none", keep=2, **options
    ) as saver:

        def save() -> None:
            world.step += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if is_blocking:
                    saver.save(world.step)
                else:
                    saver.save_async(world.step).result(WAIT_S_MAX)

        yield Ways(save, world.checkpoint)


@contextmanager
def before_steps(world: MovingState) -> Iterator[Ways]:
    # Nothing steps here, and no write takes long.
    device = asyncckpt.DeviceOptions(optimizers=[world.optimizer])
    with patch.object(save_job, "WRITE_S_MAX", 0.0), by_a_saver(world, device=device) as saves:
        yield saves


@contextmanager
def by_dcp(world: MovingState) -> Iterator[Ways]:
    stager, staged = AsyncStager(), dict[str, torch.Tensor]()

    def save() -> None:
        tensors = {**dict(world.module.named_parameters()), **dict(world.module.named_buffers())}
        found = stager.stage({**tensors, "plain": world.plain, "strided": world.strided})
        assert isinstance(found, dict)
        staged.update(found)

    yield Ways(save, lambda: {name: bits(tensor) for name, tensor in staged.items()})


@contextmanager
def written_by(run: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """Let the thread that writes the files of a save do that within `run`."""
    inner = run_save.write_files

    def write_files(*arguments: Any) -> Any:
        written: list[Any] = []
        run(lambda: written.append(inner(*arguments)))
        return written[0]

    with patch.object(run_save, "write_files", write_files):
        yield


def places_within(saves: Ways, *, in_background: bool) -> list[Place]:
    if not in_background:
        return places_of(saves.save)
    found: list[Place] = []
    with written_by(lambda write: found.extend(places_of(write))):
        saves.save()
    return found


# Those of the second kind read the state while the caller waits.
STAGED: dict[str, Callable[[MovingState], Any]] = {
    "staged": by_a_saver,
    "with a table": lambda world: by_a_saver(world, tables=True),
    "before steps": before_steps,
    "by DCP": by_dcp,
}
READ_LATER: dict[str, Callable[[MovingState], Any]] = {
    "blocking": lambda world: by_a_saver(world, is_blocking=True),
    "over the limit": lambda world: by_a_saver(world, host_memory_limit=0),
    "filtered": lambda world: by_a_saver(world, is_blocking=True, filter_func=list),
}
CASES = [*((kind, False) for kind in STAGED), *((kind, there) for kind in READ_LATER for there in (False, True))]


def mistakes(path: Path, kind: str, *, in_background: bool, count: int, seed: int) -> list[str]:
    """Return what was wrong with saves of a kind, disturbed at some places of the call, or of the background."""
    draw, world, found = random.Random(f"{seed} {kind}"), MovingState(path), list[str]()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.pop()())
    handled: list[Callable[[], object]] = []

    def by_handler(work: Callable[[], object]) -> None:
        handled.append(work)
        signal.raise_signal(signal.SIGUSR1)

    def by_thread(work: Callable[[], object]) -> None:
        other = threading.Thread(target=work)
        other.start()
        other.join()

    ways = {"a handler": by_handler, "a thread": by_thread, "a finalizer": lambda work: Finalizer(work) and None}
    try:
        with {**STAGED, **READ_LATER}[kind](world) as saves:
            for _ in range(3):
                assert saves.next() == world.bits()
            close_free(pool)
            places = places_within(saves, in_background=in_background)
            assert len(places) > 100
            drawn = draw.sample(range(len(places)), min(count, len(places)))
            # What happened before the background began shows at its first places.
            for number in sorted({*drawn, *range(2 if in_background else 0)}):
                fact, way = draw.choice(list(FACTS)), draw.choice(list(ways))
                later = places[number + 1 :]
                others = [draw.choice(later)] if later and draw.random() < 0.5 else []
                left = [(places[number], lambda fact=fact, way=way: ways[way](lambda: world.move(fact)))]
                left += [(place, lambda way=way: ways[way](lambda: world.move("memory"))) for place in others]
                shown = f"seed {seed}, {kind}, {fact} by {way} at " + ", ".join(place.where for place, _ in left)
                close_free(pool)  # So that it is touched anew.
                found += [f"{shown}: {wrong}" for wrong in disturbed(world, saves, left, in_background)]
                if draw.random() < 0.7:
                    world.move("memory")
                found += [f"{shown}: {wrong}" for _ in range(2) for wrong in undisturbed(world, saves)]
    finally:
        signal.signal(signal.SIGUSR1, before)
    return found


def undisturbed(world: MovingState, saves: Ways) -> list[str]:
    """Make one save; return what is wrong with it."""
    try:
        return [] if saves.next() == world.bits() else ["a save after it is wrong"]
    except asyncckpt.CheckpointError as error:
        return [f"a save after it: {error}"]


def disturbed(world: MovingState, saves: Ways, left: list[Any], in_background: bool) -> list[str]:
    """Make one save, disturbed at some places; return what is wrong with it."""
    world.states = [world.bits()]
    try:
        if in_background:
            with written_by(lambda write: act_at(write, left)):
                saves.save()
        else:
            act_at(saves.save, left)
    except asyncckpt.UsageError as error:
        return [] if "tensor" in str(error) else [f"refused without a name: {error}"]
    except Exception as error:  # Also what torch raises: nobody is told which tensor it was.
        return [f"{type(error).__name__}: {error}"]
    return [
        f"{name} is none of what it was: {facts[:2]}"
        for name, facts in saves.saved().items()
        if not any(facts == state[name] for state in world.states)
    ]
