"""Each callback that transformers ships comes to the same beside ours as beside its own saving, however a run ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from tests.integrations.remaining import differing
from tests.integrations.transformers_callbacks import (
    ENDS,
    AskingOnce,
    Broken,
    RaisingOnce,
    TransformersPrograms,
    differences,
    shipped,
    stand_ins,
)
from tests.shares import share_of

SERVICES_MODULE = "transformers.integrations"


@pytest.fixture(autouse=True)
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_DAGSHUB_REPO", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "https://dagshub.com/owner/name.mlflow")
    with stand_ins():
        yield


@pytest.mark.parametrize(
    "name", share_of(shipped(), "callbacks of transformers"), ids=lambda name: name.rpartition(".")[2]
)
def test_a_run_goes_on_where_it_was_ended(name: str, tmp_path: Path) -> None:
    kind, programs, wrong = name.rpartition(".")[2], TransformersPrograms(tmp_path, name), {}
    own = programs.fit("own", every=1)
    assert differences(programs.ours("whole", every=1), own) == []
    # What tells a service of a run takes part in no step of it, so a few places are enough.
    every = 3 if name.startswith(SERVICES_MODULE) else 1

    def go_on(folder: str, what: str) -> None:
        step = programs.newest(folder)
        found = programs.ours(folder, resume=step > 0)
        shutil.rmtree(tmp_path / folder)
        differs = set(differences(found, own))
        if step == own["steps"]:  # A run that has ended draws none, so transformers sets none.
            differs.discard("random numbers")
        if differs:
            by_own = programs.own_resumed(step) if step else own
            others = differs & set(differences(found, by_own)) - {"losses"}  # Its own forgets some.
            if not differing(kind, differs, is_as_own=not others):
                wrong[f"{what}, from step {step}"] = differs

    for step in share_of(asyncckpt.list_steps(programs.steps_of("whole")), f"kills of {kind}", every=every):
        shutil.copytree(tmp_path / "whole", tmp_path / "part")
        asyncckpt.checkpoints.remove_after(programs.steps_of("part"), step)
        go_on("part", "killed")
    ends: list[tuple[str, int, Any]] = [
        (hook, step, Broken() if error == "error" else KeyboardInterrupt()) for hook, (step, error) in ENDS.items()
    ]
    for hook, step, error in share_of(ends, f"ends of {kind}", every=every):
        programs.ours("part", RaisingOnce(hook, step, error))
        go_on("part", f"{type(error).__name__} in {hook} at step {step}")
    if kind == "JITCheckpointCallback":
        for step in (3, 5, 8):
            programs.ours("part", AskingOnce(step))
            go_on("part", f"asked at step {step}")
    assert wrong == {}, wrong
