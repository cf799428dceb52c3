"""Two tables, a tensor and a value, saved in all ways there are, beside a copy of what every committed step held.

What a load of a step gives must be that copy, whatever has happened since: saves that failed, compaction, retention.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import DeltaPolicy, IndeterminateError, IOFailedError, SaveCancelledError, Saver, UsageError
from asyncckpt.filters import keep_rows, skip_zero_rows
from tests.deltas.failing_storage import Hold, failing, watched
from tests.deltas.table_world import Rows, TableWorld, new_levels, new_table
from tests.worlds.rows import rows_of

RESULT_SECONDS_MAX = 60.0
# The tables are so small that a share of bytes would say nothing: nearly all of a file is its header.
POLICY = DeltaPolicy(deltas_max=3, bytes_share_max=1e9)

FILTERS = {
    "odd": keep_rows("plain", lambda columns: columns["last_seen"] % 2 == 1),
    "zeros": skip_zero_rows("*@sum"),
}


@dataclass(frozen=True)
class Copy:
    """What a step held."""

    tables: dict[str, Rows]
    dense: list[float]


class SavesWorld:
    """Tables under random changes, one directory, and the Saver that is open."""

    def __init__(self, root: Path, *, policy: str = "lru") -> None:
        self.root = root
        self.worlds = {
            "plain": TableWorld(new_table("plain")),
            "levels": TableWorld(new_levels("levels", policy=policy)),
        }
        self.dense = torch.zeros(3)
        self.committed: dict[int, Copy] = {}
        self.step = 0
        self.keep: int | None = None
        self.has_base = False  # Whether this Saver has committed a checkpoint.
        self.kinds: list[str] = []
        self.loaded: set[int] = set()
        self.open()

    # -- the Saver -----------------------------------------------------------------------------------------------

    def open(
        self,
        *,
        keep: int | None = None,
        host_level: Any = "copy",
        refresh: bool = True,
        filters: Sequence[str] = (),
    ) -> None:
        """`filters` are names of FILTERS."""
        self.keep = keep
        self.filters = filters
        self.has_base = False
        self.saver = Saver(
            path=self.root,
            hashtables={name: world.table for name, world in self.worlds.items()},
            tensors={"dense": self.dense, "progress": _StepValue(self)},
            deltas=POLICY,
            keep=keep,
            device=asyncckpt.DeviceOptions(host_level=host_level),
            debug=asyncckpt.DebugOptions(refresh=refresh),
            filters=[FILTERS[name] for name in filters],
        )

    def close(self) -> None:
        self.saver.close()
        self.steps()

    # -- saves ---------------------------------------------------------------------------------------------------

    def save(self, kind: Any, *, blocking: bool = False, meanwhile: Sequence[int] = ()) -> None:
        """Save, and while it is written go on with rows that were looked up before."""
        self._next_step()
        if kind == "delta" and not self.has_base:
            with pytest.raises(UsageError, match="delta"):
                self.saver.save_async(self.step, kind=kind)
            return
        copy = self._copy()
        if blocking:
            result = self.saver.save(self.step, kind=kind)
        else:
            held = {name: world.hold(meanwhile) for name, world in self.worlds.items()}
            future = self.saver.save_async(self.step, kind=kind)
            for name, world in self.worlds.items():
                world.write_held(held[name])
            self.dense += 1
            result = future.result(RESULT_SECONDS_MAX)
        assert kind == "auto" or result.kind == kind
        self.kinds.append(result.kind)
        self.saver.wait_idle(RESULT_SECONDS_MAX)
        self._has_committed(copy)

    def fail(self, kind: Any, *, at: int) -> None:
        """Save while an operation of the storage fails; with some luck it is not reached."""
        self._next_step()
        if kind == "delta" and not self.has_base:
            return
        copy = self._copy()
        with failing(at) as storage:
            error = self.saver.save_async(self.step, kind=kind).exception(RESULT_SECONDS_MAX)
            self.saver.wait_idle(RESULT_SECONDS_MAX)  # For retention, which may fail too.
        if error is None:
            # Retention may have failed, which is no failure of the save.
            self.committed[self.step] = copy
            self.has_base = True
        elif isinstance(error, IndeterminateError):
            # Whether it is durable is in doubt, but it is there; only a new Saver goes on.
            assert error.resolve()
            self.committed[self.step] = copy
            self.close()
            self.open(keep=self.keep, filters=self.filters)
        else:
            assert isinstance(error, IOFailedError), repr(error)
            assert storage.failed is not None
            assert self.step not in self.steps()

    def save_while_busy(self, kind: Any, *, on_meanwhile: Callable[[], object]) -> None:
        """Save, and while that is held at its first operation ask for another save, which is skipped."""
        self._next_step()
        copy = self._copy()
        hold = Hold()
        with watched(hold):
            future = self.saver.save_async(self.step, kind=kind)
            on_meanwhile()
            assert self.saver.save_async(self.step + 1, kind=kind, on_busy="skip").result(RESULT_SECONDS_MAX).skipped
            hold.let_go()
            self.kinds.append(future.result(RESULT_SECONDS_MAX).kind)
            self.saver.wait_idle(RESULT_SECONDS_MAX)
        self._has_committed(copy)

    def cancel(self, kind: Any) -> None:
        """Cancel a save at its first operation."""
        self._next_step()
        if kind == "delta" and not self.has_base:
            return
        hold = Hold()
        with watched(hold):
            future = self.saver.save_async(self.step, kind=kind)
            assert future.cancel()
            hold.let_go()
            error = future.exception(RESULT_SECONDS_MAX)
        assert isinstance(error, SaveCancelledError), repr(error)

    def compact(self, step: int, *, offline: bool) -> None:
        """Fold the chain of a step; it stays what it was."""
        if offline:
            self.close()
            asyncckpt.compact(self.root, step)
            self.open(keep=self.keep, filters=self.filters)
        else:
            self.saver.compact(step).result(RESULT_SECONDS_MAX)
        assert asyncckpt.describe(self.root, step).kind == "full"
        self.check_step(step)

    def load_live(self, step: int) -> None:
        """Go back to a step: load it into the tables that are trained."""
        asyncckpt.Loader(
            self.root,
            hashtables={name: world.table for name, world in self.worlds.items()},
            tensors={"dense": self.dense},
            step=step,
        ).load()
        self.loaded.add(step)
        for name, world in self.worlds.items():
            world.was_loaded(self.committed[step].tables[name])
            world.check()

    # -- checks --------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps that are there; what retention has taken is forgotten, and nothing else may be gone."""
        steps = asyncckpt.list_steps(self.root) if self.committed or self.root.exists() else []
        if self.keep is None:
            assert steps == sorted(self.committed)
        else:
            kept = sorted(self.committed)[-self.keep :]
            assert set(kept) <= set(steps) <= set(self.committed)
        self.committed = {step: self.committed[step] for step in steps}
        return steps

    def check_step(self, step: int) -> None:
        """A step loads into fresh tables and is bit for bit what it was."""
        tables = {name: new_table(name) for name in self.worlds}
        dense = torch.full((3,), -1.0)
        report = asyncckpt.Loader(self.root, hashtables=tables, tensors={"dense": dense}, step=step).load()
        self.loaded.add(step)
        copy = self.committed[step]
        found = {name: rows_of(table) for name, table in tables.items()}
        assert found == copy.tables, f"step {step} is not what was saved"
        assert dense.tolist() == copy.dense
        assert report.values["progress.step"] == step

    def check_all(self) -> None:
        for step in self.steps():
            self.check_step(step)

    def _check_kept(self) -> None:
        """Retention, which has just run, left what the newest steps need, and nothing else."""
        steps = self.steps()
        if self.keep is None:
            return
        # The newest step that this process has loaded is kept too: the others are not known to be good.
        kept = {*steps[-self.keep :], *([max(self.loaded)] if self.loaded else [])} & set(steps)
        needed = {parent for step in kept for parent in parents_of(self.root, step)}
        assert set(steps) <= kept | needed

    # -- inside --------------------------------------------------------------------------------------------------

    def _next_step(self) -> None:
        self.step += 1

    def _copy(self) -> Copy:
        tables = {name: dict(world.rows) for name, world in self.worlds.items()}
        if "odd" in self.filters:
            tables["plain"] = {id: row for id, row in tables["plain"].items() if row[3] % 2 == 1}
        return Copy(tables, self.dense.tolist())

    def _has_committed(self, copy: Copy) -> None:
        self.committed[self.step] = copy
        self.has_base = True
        self._check_kept()


class _StepValue:
    """A value of the state that is different at every step."""

    def __init__(self, world: SavesWorld) -> None:
        self._world = world

    def state_dict(self) -> dict[str, int]:
        return {"step": self._world.step}


def parents_of(root: Path, step: int) -> list[int]:
    """The chain that a step pins, as its manifest says."""
    folder = root / "manifests"
    compacted = folder / f"{step:012d}.full.json"
    manifest = json.loads((compacted if compacted.exists() else folder / f"{step:012d}.json").read_text())
    return [parent["step"] for parent in manifest.get("parents", [])]
