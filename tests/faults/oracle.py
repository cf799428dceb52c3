"""What must hold of a checkpoint directory after a crash or a failed save. One answer: the old step or the new one.

`check_steps` reads only. `check_next_save` shows that the directory is usable and that nothing of the crash stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from sample_state import SampleState, digest_of_step
from scenarios import AFTER_STEP, NEW_STEP, Scenario

import asyncckpt
from asyncckpt import NotFoundError

expected_digest = lru_cache(maxsize=None)(digest_of_step)


def listed_steps(root: Path) -> list[int]:
    """Steps with a manifest; none where the directory does not exist yet, in whole or in part."""
    try:
        return asyncckpt.list_steps(root)
    except NotFoundError:
        return []


def check_steps(root: Path, *, acknowledged: int | None, candidates: Collection[int]) -> list[int]:
    """Every listed step loads and is the state of that step; returns them.

    The newest is at least the acknowledged one, and all are candidates. Nothing is changed by looking.
    """
    before = tree_of(root)
    steps = listed_steps(root)
    assert set(steps) <= set(candidates), f"steps {steps} are listed, expected only {sorted(candidates)}"
    newest = steps[-1] if steps else None
    if acknowledged is not None:
        assert newest is not None, f"step {acknowledged} was acknowledged and nothing is there"
        assert newest >= acknowledged, f"step {acknowledged} was acknowledged, the newest is {newest}"
    for step in steps:
        check_load(root, step, newest=step == newest)
    assert tree_of(root) == before, "a load changed the directory"
    return steps


def check_standing(scenario: Scenario, steps: Collection[int]) -> None:
    """Nothing that stood there before is gone, unless retention has had its turn."""
    if scenario.keep is None or NEW_STEP not in steps:
        assert scenario.standing <= set(steps), f"earlier checkpoints are gone, {sorted(steps)} are left"


def is_done(scenario: Scenario, root: Path) -> bool:
    """Whether what was disturbed is there."""
    if scenario.act == "compact":
        return (root / "manifests" / f"{NEW_STEP:012d}.full.json").exists()
    return NEW_STEP in listed_steps(root)


def check_load(root: Path, step: int, *, newest: bool = False) -> None:
    """A step loads and is the state of that step; asked for as the newest, or by its number."""
    state = SampleState()
    loaded = state.load(root, None if newest else step)
    assert loaded == step, f"step {loaded} was loaded, expected {step}"
    assert state.digest() == expected_digest(step), f"step {step} loads, but is not what was saved"


def check_next_save(root: Path, scenario: Scenario, step: int = AFTER_STEP) -> None:
    """A new Saver saves, the save loads, and nothing unreferenced is left."""
    state = SampleState()
    with scenario.open(root, state) as saver:
        assert scenario.save(saver, state, step).step == step
    check_load(root, step, newest=True)
    check_no_leftovers(root)


def check_no_leftovers(root: Path) -> None:
    """manifests/ and data/ hold what the checkpoints need, and nothing else."""
    manifests = sorted((root / "manifests").iterdir())
    files = {file["path"] for manifest in manifests for file in json.loads(manifest.read_text())["files"]}
    named = {name for step in asyncckpt.list_steps(root) for name in (f"{step:012d}.json", f"{step:012d}.full.json")}
    assert {manifest.name for manifest in manifests} <= named, f"manifests/ holds {manifests}"
    found = {str(path.relative_to(root)) for path in (root / "data").rglob("*") if not path.is_dir()}
    assert found == files, f"files differ from what the manifests name: {sorted(found ^ files)}"
    folders = {path.name for path in (root / "data").iterdir()}
    assert folders == {file.split("/")[1] for file in files}, f"data/ holds {sorted(folders)}"


def tree_of(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every path below root with size, time of change and inode: equal when nothing was written."""
    found = {}
    for folder, _, names in os.walk(root):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            status = os.lstat(path)
            found[path] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found
