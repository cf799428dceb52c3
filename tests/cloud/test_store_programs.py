"""Random programs of what people do with a Saver in a store, beside a model of it, while requests fail at random.

After each operation: every step that is listed was saved, and loads as it was at its save; the newest that was
acknowledged, and what is pinned, is there, unless somebody has removed it. A removal that failed may come to its end
later, by whoever removes next.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import checkpoints
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.cloud.small_parts import small_parts

__all__ = ["small_parts"]

OPERATIONS_COUNT = 40
IDS_COUNT = 30
# Those that a client waits for take seconds: each tenth fault.
QUICK = [
    Mishap(answer_after=(500, "InternalError")),
    Mishap(answer=(503, "SlowDown")),
    Mishap(answer=(403, "AccessDenied")),
    Mishap(cut_up=10),
    Mishap(cut_down=3),
]
SLOW = [Mishap(silent=True), Mishap(silent_after=True)]
Image = tuple[float, dict[int, float]]


@dataclass
class StoreProgram:
    """saved: what may be there, by step. acknowledged: what was said to be there. gone: what was removed, perhaps."""

    proxy: FaultProxy
    url: str
    choices: random.Random
    dense: torch.Tensor = field(default_factory=lambda: torch.zeros(3))
    table: asyncckpt.HashTable = field(default_factory=lambda: asyncckpt.HashTable("t", 1))
    saved: dict[int, Image] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    listed: list[int] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def run(self) -> None:
        self.open()
        for _ in range(OPERATIONS_COUNT):
            names = ["train", "save", "save", "save", "open", "remove", "prune", "pin", "unpin", "sweep"]
            name = self.choices.choice([*names, "compact", "compact"])
            self.done.append(name)
            self.train()
            with self.disturbed() if self.choices.random() < 0.4 else contextlib.nullcontext():
                getattr(self, name)()
            self.check()
        self.saver.close()

    @contextlib.contextmanager
    def disturbed(self) -> Any:
        """Let one request of the operation fail, or a few that follow each other."""
        fault = self.choices.choice(SLOW if self.choices.random() < 0.1 else QUICK)
        after, count = self.choices.randrange(12), self.choices.choice([1, 1, 3])
        begin = len(self.proxy.requests) + after
        self.done.append(f"fault {fault} at {after}, {count} times")

        def disturb(request: Request) -> Mishap | None:
            return fault if begin <= request.number < begin + count else None

        self.proxy.fault = disturb
        try:
            yield
        finally:
            self.proxy.fault = lambda request: None

    # -- operations

    def open(self) -> None:
        if hasattr(self, "saver"):
            self.saver.close()
        keep = self.choices.choice([None, 1, 2, 3])
        self.keep = keep
        while True:
            with contextlib.suppress(asyncckpt.IOFailedError):
                self.saver = asyncckpt.Saver(
                    path=self.url, hashtables={"t": self.table}, tensors={"dense": self.dense}, keep=keep
                )
                return

    def train(self) -> None:
        self.dense.fill_(self.choices.random())
        ids = torch.tensor(sorted(self.choices.sample(range(IDS_COUNT), 5)))
        self.table.insert(ids, torch.full((5, 1), float(self.dense[0])))
        self.table.remove(torch.tensor([self.choices.randrange(IDS_COUNT)]))

    def save(self) -> None:
        step = max(self.saved, default=-1) + 1
        self.saved[step] = self.image()
        kind: Any = self.choices.choice(["full", "delta", "auto"])
        try:
            result = self.saver.save_async(step, kind=kind).result()
        except asyncckpt.IndeterminateError as error:
            self.proxy.fault = lambda request: None
            is_asked = self.choices.random() < 0.5  # Else the next save finds out.
            if is_asked and error.resolve():
                self.acknowledged.add(step)
            else:
                self.gone.add(step)
            if is_asked:
                self.open()
        except asyncckpt.CheckpointError as error:
            self.done.append(f"{type(error).__name__}: {error}"[:200])
            self.proxy.fault = lambda request: None
            assert step not in self.steps(), "a save that failed is there"
            if self.choices.random() < 0.5:
                del self.saved[step]
        else:
            assert result.step == step
            self.acknowledged.add(step)
            if self.keep is not None:
                self.gone.update([*self.listed, step][: -self.keep])
        with contextlib.suppress(asyncckpt.CheckpointError):
            self.saver.wait_idle()

    def remove(self) -> None:
        if steps := self.listed:
            chosen = self.choices.sample(steps, self.choices.choice([1, 1, 2]) if len(steps) > 1 else 1)
            if {*chosen} & self.pinned:
                with pytest.raises(asyncckpt.CheckpointError):
                    checkpoints.remove(self.url, chosen)
                return
            before = {*self.gone}
            self.gone.update(chosen)
            try:
                checkpoints.remove(self.url, chosen)
            except (asyncckpt.UsageError, asyncckpt.ConflictError, asyncckpt.NotFoundError):  # E.g. a delta needs one.
                self.gone = before
            except asyncckpt.IOFailedError:
                pass

    def compact(self) -> None:
        if not self.listed:
            return
        step = self.choices.choice(self.listed)
        try:
            if self.choices.random() < 0.5:
                self.saver.compact(step).result()
            else:
                asyncckpt.compact(self.url, step)
        except asyncckpt.IndeterminateError as error:
            self.proxy.fault = lambda request: None
            if self.choices.random() < 0.5:
                self.done.append(f"in doubt, and {'there' if error.resolve() else 'not there'}")
                self.open()
        except asyncckpt.CheckpointError as error:
            self.done.append(f"{type(error).__name__}: {error}"[:200])

    def prune(self) -> None:
        count = self.choices.choice([1, 2])
        self.gone.update(self.listed[:-count])
        with contextlib.suppress(asyncckpt.IOFailedError, asyncckpt.NotFoundError):
            checkpoints.prune(self.url, count)

    def pin(self) -> None:
        if steps := self.listed:
            step = self.choices.choice(steps)
            with contextlib.suppress(asyncckpt.IOFailedError, asyncckpt.NotFoundError):
                checkpoints.pin(self.url, step)
                self.pinned.add(step)

    def unpin(self) -> None:
        for step in sorted(self.pinned):
            self.pinned.discard(step)
            with contextlib.suppress(asyncckpt.IOFailedError, asyncckpt.NotFoundError):
                checkpoints.unpin(self.url, step)

    def sweep(self) -> None:
        with contextlib.suppress(asyncckpt.IOFailedError, asyncckpt.NotFoundError):
            checkpoints.collect_garbage(self.url)

    # -- what must hold

    def image(self) -> Image:
        ids = self.table.ids()
        rows = self.table.embedding[self.table.lookup(ids, insert=False)][:, 0]
        return float(self.dense[0]), dict(zip(ids.tolist(), rows.tolist(), strict=True))

    def steps(self) -> list[int]:
        try:
            return asyncckpt.list_steps(self.url)
        except asyncckpt.NotFoundError:
            return []

    def check(self) -> None:
        steps = self.listed = self.steps()
        story = "\n".join(self.done)
        assert {*steps} <= self.saved.keys(), story
        lasting = self.acknowledged - self.gone
        assert {*sorted(lasting)[-1:]} <= {*steps}, story
        assert self.acknowledged & self.pinned <= {*steps}, story
        for step in {*steps[-1:], *self.choices.sample(steps, min(1, len(steps)))}:
            dense, table = torch.zeros(3), asyncckpt.HashTable("t", 1)
            asyncckpt.Loader(self.url, {"t": table}, {"dense": dense}, step=step, verify="before").load()
            ids = table.ids()
            rows = table.embedding[table.lookup(ids, insert=False)][:, 0]
            found = float(dense[0]), dict(zip(ids.tolist(), rows.tolist(), strict=True))
            assert found == self.saved[step], f"step {step}\n{story}"


@pytest.mark.random
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lane", [0, *(pytest.param(lane, marks=pytest.mark.slow) for lane in range(1, 20))])
def test_what_is_acknowledged_is_there(proxy: FaultProxy, url: str, base_seed: int, lane: int) -> None:
    StoreProgram(proxy, url, random.Random(base_seed + lane)).run()
