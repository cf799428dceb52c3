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
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.dcp import AsyncStager
from asyncckpt.staging.pool import pool
from tests.interrupts.places import act_at, places_of

WAIT_S_MAX = 60.0
SHAPE = 64, 64  # As large as what steps wait for.
Bits = Mapping[str, tuple[torch.dtype, tuple[int, ...], bytes]]
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


class World:
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


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    whole = tensor.detach().resolve_neg().contiguous()
    return whole.dtype, tuple(whole.shape), whole.view(torch.uint8).numpy().tobytes()


Save = Callable[[], Bits]


@contextmanager
def by_a_saver(world: World, *, is_blocking: bool = False, tables: bool = False, **options: Any) -> Iterator[Save]:
    hashtables = {"t": world.table} if tables else None
    with asyncckpt.Saver(
        path=world.path, tensors=world.state, hashtables=hashtables, durability="none", keep=2, **options
    ) as saver:

        def save() -> Bits:
            world.step += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if is_blocking:
                    saver.save(world.step)
                else:
                    saver.save_async(world.step).result(WAIT_S_MAX)
            return world.checkpoint()

        yield save


@contextmanager
def by_dcp(world: World) -> Iterator[Save]:
    stager = AsyncStager()

    def save() -> Bits:
        tensors = {**dict(world.module.named_parameters()), **dict(world.module.named_buffers())}
        staged = stager.stage({**tensors, "plain": world.plain, "strided": world.strided})
        assert isinstance(staged, dict)
        return {name: bits(tensor) for name, tensor in staged.items()}

    yield save


SAVES: dict[str, Callable[[World], Any]] = {
    "staged": by_a_saver,
    "with a table": lambda world: by_a_saver(world, tables=True),
    "blocking": lambda world: by_a_saver(world, is_blocking=True),
    "over the limit": lambda world: by_a_saver(world, host_memory_limit=0),
    "filtered": lambda world: by_a_saver(world, is_blocking=True, filter_func=list),
    "before steps": lambda world: by_a_saver(world, device=asyncckpt.DeviceOptions(optimizers=[world.optimizer])),
    "by DCP": by_dcp,
}


def mistakes(path: Path, kind: str, *, count: int, seed: int) -> list[str]:
    """Return what was wrong with saves of a kind, disturbed at some of their places."""
    draw, world, found = random.Random(f"{seed} {kind}"), World(path), list[str]()
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
        with SAVES[kind](world) as save:
            for _ in range(3):
                assert save() == world.bits()
            pool.trim()
            places = places_of(save)
            assert len(places) > 100
            for number in sorted(draw.sample(range(len(places)), min(count, len(places)))):
                fact, way = draw.choice(list(FACTS)), draw.choice(list(ways))
                others = [place for place in places[number + 1 :] if draw.random() < 0.5][:1]
                left = [(places[number], lambda fact=fact, way=way: ways[way](lambda: world.move(fact)))]
                left += [(place, lambda way=way: ways[way](lambda: world.move("memory"))) for place in others]
                shown = f"seed {seed}, {kind}, {fact} by {way} at " + ", ".join(place.where for place, _ in left)
                pool.trim()  # So that it is touched anew.
                found += [f"{shown}: {wrong}" for wrong in disturbed(world, save, left)]
                if draw.random() < 0.7:
                    world.move("memory")
                for turn in range(2):
                    if save() != world.bits():
                        found.append(f"{shown}: save {turn + 1} after it is wrong")
    finally:
        signal.signal(signal.SIGUSR1, before)
    return found


def disturbed(world: World, save: Save, left: list[Any]) -> list[str]:
    """Make one save, disturbed at some places; return what is wrong with it."""
    world.states = [world.bits()]
    saved: list[Bits] = []
    try:
        act_at(lambda: saved.append(save()), left)
    except asyncckpt.UsageError as error:
        return [] if "tensor" in str(error) else [f"refused without a name: {error}"]
    return [
        f"{name} is none of what it was: {facts[:2]}"
        for name, facts in saved[0].items()
        if not any(facts == state[name] for state in world.states)
    ]
