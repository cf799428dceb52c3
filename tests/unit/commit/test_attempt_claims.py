"""Claims: a step is saved once at a time, and whoever sweeps knows what is under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
import asyncckpt.commit.attempt as claims_module
from asyncckpt.commit.attempt import claims
from asyncckpt.commit.root import CheckpointRoot
from tests.chains.model import layer_of
from tests.chains.written import write


@pytest.fixture
def root(tmp_path: Path) -> Iterator[CheckpointRoot]:
    with CheckpointRoot.for_writing(tmp_path / "root") as opened:
        yield opened


def test_the_next_step_counts_what_is_committed_and_what_is_being_saved(root: CheckpointRoot) -> None:
    with claims.save(root, None) as first:
        assert first.step == 0
    write(root.path, 5, {"user": layer_of({})})
    with claims.save(root, None) as one, claims.save(root, None) as two:
        assert (one.step, two.step) == (6, 7)


def test_a_step_is_saved_once_at_a_time(root: CheckpointRoot) -> None:
    with claims.save(root, 3), pytest.raises(asyncckpt.ConflictError, match="step 3 already exists"):
        claims.save(root, 3)
    claims.save(root, 3).release()
    write(root.path, 3, {"user": layer_of({})})
    with pytest.raises(asyncckpt.ConflictError, match="step 3 already exists"):
        claims.save(root, 3)
    for wrong in (-1, 10**12, True, "3"):
        with pytest.raises(asyncckpt.UsageError, match="step must be"):
            claims.save(root, wrong)  # type: ignore[arg-type]


def test_who_is_refused_leaves_the_claim_of_the_same_attempt_alone(root: CheckpointRoot) -> None:
    """An import goes on with the attempt that it finds: that of one that runs, if nothing else keeps them apart."""
    with claims.save(root, 3) as held:
        with pytest.raises(asyncckpt.ConflictError, match="step 3 already exists"):
            claims.save(root, 3, lambda step: held.attempt)
        assert held.attempt.id in claims.held
        assert claims.needed(root.root.identity) == {3}


def test_a_step_that_another_save_commits_while_it_is_chosen_is_not_claimed(
    root: CheckpointRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, saved = claims_module.is_committed, []

    def look_and_save(*arguments: Any) -> bool:
        found = look(*arguments)
        if not saved:
            saved.append(None)
            with asyncckpt.Saver(path=root.path, tensors={"n": 1}) as saver:
                saved[0] = saver.save().step
        return found

    monkeypatch.setattr(claims_module, "is_committed", look_and_save)
    with claims.save(root, None) as claim:
        assert not look(root, claim.step)
        assert claim.step != saved[0]


def test_a_compaction_may_run_beside_saves_and_once_for_a_step(root: CheckpointRoot) -> None:
    with claims.compaction(root, 3), claims.compaction(root, 4):
        with pytest.raises(asyncckpt.ConflictError, match=r"step 3 .* being compacted already"):
            claims.compaction(root, 3)
        claims.save(root, 3).release()


def test_directories_are_told_apart_by_what_they_are(root: CheckpointRoot, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root.path)
    with (
        CheckpointRoot.for_writing(tmp_path / "link") as same,
        CheckpointRoot.for_writing(tmp_path / "other") as other,
        claims.save(root, 1),
    ):
        claims.save(other, 1).release()
        with pytest.raises(asyncckpt.ConflictError):
            claims.save(same, 1)


def test_sweeps_know_attempts_that_begin_while_they_look(root: CheckpointRoot) -> None:
    with claims.save(root, 5) as own:
        assert set(claims.held) == {own.attempt.id}
        with claims.compaction(root, 4) as other:
            assert other.attempt.id in claims.held
            assert len(claims.held) == 2
        assert other.attempt.id not in claims.held
    assert not claims.held
