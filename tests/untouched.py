"""Around every load of the suite: one that is refused has changed nothing.

What is looked at before each load, and after one that is refused, bit for bit: dense targets, the states of objects and
the rows of hash tables on the host; of all of them BYTES_MAX at most, the first ones, so that the suite hardly notices.
A load is refused if it raises IncompatibleError or UsageError, or anything before the first target is filled. Only the
load_state_dict of an object that nobody knows may fail later.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import pytest
import torch

from asyncckpt import errors
from asyncckpt.embcache import load_ranks
from asyncckpt.engine.follow import table_update
from asyncckpt.engine.load import run_load
from asyncckpt.engine.load.load_object import PlainPart
from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.format.tree import path_name
from asyncckpt.formats.recis import loader as recis_loader
from asyncckpt.plan.load_targets import DenseTargets, Rebuilt
from asyncckpt.plan.state import flatten
from asyncckpt.strategies import stored_state
from asyncckpt.tables.hash_table import HashTable

BYTES_MAX = 1 << 18
KNOWN = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
Look = Callable[[], Any]


class Looks:
    """What a load could change, as it was, and how to look again."""

    def __init__(self) -> None:
        self.left, self.is_filling = BYTES_MAX, False
        self.found: dict[str, tuple[Any, Look]] = {}
        self.targets: DenseTargets | None = None

    def take(self, targets: DenseTargets, tables: Mapping[str, Any]) -> None:
        self.targets = targets
        memory = sys.modules.get("tests.simulated_device.memory")
        if memory is not None and memory._regions:
            return  # Nobody may read what a simulated device has.
        for leaf in targets.in_place:
            for number, piece in enumerate(leaf.pieces):
                self._add(f"target {leaf.name!r} [{number}]", piece.tensor, lambda own=piece.tensor: own)
        for item in targets.rebuilt:
            if not item.is_module and not isinstance(item.owner, PlainPart):
                state = [list(item.tensors.values()), list(item.values.values())]
                self._add(f"state of {path_name(item.path)!r}", state, lambda item=item: _state(item))
        for name, table in tables.items():
            if type(table) is HashTable and len(table) * 16 < self.left:
                self._add(f"table {name!r}", _rows(table), lambda table=table: _rows(table))

    def _add(self, what: str, now: Any, look: Look) -> None:
        size = sum(tensor.nbytes if tensor.device.type == "cpu" else BYTES_MAX + 1 for tensor in _tensors(now))
        if size <= self.left:
            self.left -= size
            self.found.setdefault(what, (_bits(now), look))

    def check(self, error: BaseException) -> None:
        """Raise AssertionError where anything differs after a load that has raised this."""
        is_refused = isinstance(error, (IncompatibleError, UsageError)) or not self.is_filling
        if not is_refused or (self.is_filling and self._is_of_unknown(error)):
            return
        changed = [what for what, (was, look) in self.found.items() if _bits(look()) != was]
        assert not changed, f"a load that was refused has changed {changed}: {error}"

    def _is_of_unknown(self, error: BaseException) -> bool:
        assert self.targets is not None
        failed = [
            item for item in self.targets.rebuilt if f"load_state_dict of {path_name(item.path)!r} " in str(error)
        ]
        return any(not isinstance(item.owner, KNOWN) for item in failed)


def _state(item: Rebuilt) -> list[list[Any]]:
    flat = flatten({"state": item.owner})
    tensors: list[Any] = [flat.originals.get(number, tensor) for number, tensor in enumerate(flat.tensors)]
    return [tensors, flat.values]


def _rows(table: HashTable) -> Any:
    ids = table.ids().sort().values
    return [ids, *(values for _, values in sorted(table.read(ids).items()))]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, list):
        for item in value:
            yield from _tensors(item)


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        own = value.detach()
        own = (own.to_local() if hasattr(own, "to_local") else own).resolve_conj().resolve_neg().contiguous()
        own = own.clone()  # What has been an array of NumPy cannot be resized any more.
        return own.dtype, tuple(own.shape), own.view(-1).view(torch.uint8).numpy().tobytes() if own.numel() else b""
    return [_bits(item) for item in value] if isinstance(value, list) else repr(value)


_running = threading.local()


def _looking(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what loads, or plans a load that somebody else runs."""

    @wraps(real)
    def load(*arguments: Any, **options: Any) -> Any:
        outer = getattr(_running, "looks", None)
        looks = _running.looks = Looks() if outer is None else outer
        try:
            return real(*arguments, **options)
        except BaseException as error:
            if outer is None:
                looks.check(error)
            raise
        finally:
            _running.looks = outer

    return load


def _taking(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def plan(chain: Any, contents: Any, targets: DenseTargets, tables: Any, **options: Any) -> Any:
        looks = getattr(_running, "looks", None)
        if looks is not None:
            with suppress(Exception):  # What cannot be read, as memory of a device that is lost, is not looked at.
                looks.take(targets, tables)
        return real(chain, contents, targets, tables, **options)

    return plan


def _noting(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def fill(*arguments: Any, **options: Any) -> Any:
        if getattr(_running, "looks", None) is not None:
            _running.looks.is_filling = True
        return real(*arguments, **options)

    return fill


@contextmanager
def looked_at() -> Iterator[None]:
    """Look at all loads in this block."""
    import asyncckpt.loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "_OUR_FRAMES", (*errors._OUR_FRAMES, __file__))  # No caller that a warning names.
        for module in (run_load, recis_loader, table_update, load_ranks):
            patch.setattr(module, "make_load_plan", _taking(module.make_load_plan))
        for module in (run_load, recis_loader, table_update):
            patch.setattr(module, "fill", _noting(module.fill))
        for module in (asyncckpt.loader, stored_state):
            patch.setattr(module, "run_load", _looking(module.run_load))
        patch.setattr(load_ranks, "open_step", _looking(load_ranks.open_step))
        patch.setattr(recis_loader.Loader, "load", _looking(recis_loader.Loader.load))
        yield
