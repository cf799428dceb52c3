"""Errors travel between processes: other ranks are told of them by whatever means they have."""

from __future__ import annotations

import asyncio
import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.errors import (
    CheckpointError,
    CorruptError,
    IndeterminateError,
    IOFailedError,
    PeerError,
    PeerInDoubtError,
    UsageError,
    closing_beside,
)

pytestmark = pytest.mark.any_core

ERRORS = [
    CorruptError("a file is damaged", found=b"x", expected=[1], hint="load another"),
    IOFailedError("a write failed", errno=28, hint="free space"),
    IndeterminateError("the commit is in doubt", resolve=lambda: True),
    PeerError("the save was aborted", rank=3, cause="OSError: full"),
    PeerInDoubtError("the save may be there", rank=0, cause="silence", resolve=lambda: True),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_with_its_text_and_facts(error: CheckpointError) -> None:
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is type(error)
    assert str(received) == str(error)
    for fact in ("what", "hint", "errno", "rank", "cause"):
        assert getattr(received, fact, None) == getattr(error, fact, None)
    assert str(copy.copy(error)) == str(error)


def test_a_very_long_name_is_printed_without_its_middle() -> None:
    name = "a" * 1_000_000 + "z"
    error = UsageError(f"tensor {name!r} has another name", expected=name, found=[name], hint="rename it")
    assert len(str(error)) < 7000
    assert str(error).startswith("tensor 'aaa")
    assert str(error).endswith("az (rename it)")
    assert error.found == [name]


def test_another_process_cannot_resolve() -> None:
    received = pickle.loads(pickle.dumps(ERRORS[2]))
    with pytest.raises(UsageError, match="came from another process"):
        received.resolve()


def test_every_error_of_the_tree_can_travel() -> None:
    kinds = [kind for kind in vars(asyncckpt).values() if isinstance(kind, type) and issubclass(kind, CheckpointError)]
    tried = {type(error) for error in ERRORS}
    for kind in kinds:
        if kind not in tried and not issubclass(kind, (IndeterminateError, PeerError)):
            assert str(pickle.loads(pickle.dumps(kind("what")))) == "what"


def test_an_error_of_closing_is_raised_alone_and_noted_beside_another() -> None:
    with (
        pytest.raises(IOFailedError, match="the disk is full"),
        closing_beside(None, "closing the Saver raised"),
    ):
        raise IOFailedError("the disk is full")
    first = ValueError("first")
    with closing_beside(first, "closing the Saver raised"):
        raise IOFailedError("the disk is full")
    if hasattr(first, "add_note"):
        assert first.__notes__ == ["and closing the Saver raised: the disk is full"]


@pytest.mark.parametrize("beside", [SystemExit(1), GeneratorExit(), asyncio.CancelledError()])
def test_an_error_of_closing_is_printed_where_no_note_is_seen(
    beside: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing_beside(beside, "closing the Saver raised"):
        raise IOFailedError("the disk is full")
    assert capsys.readouterr().err == "asyncckpt: closing the Saver raised: the disk is full\n"


def test_a_warning_points_at_the_program(tmp_path: Path) -> None:
    """Wherever in the package it comes from: see the calls of `warn`."""
    tmp_path.chmod(0o777)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(1 << 16)}, host_memory_limit=1) as saver:
            saver.save_async(1)
        with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(1)}, filter_func=lambda files: files[9]) as saver:
            periodic = asyncckpt.PeriodicSaver(saver, every_steps=1, on_error="warn")
            periodic.step(2)
            periodic.drain(60)
        asyncckpt.MultiLevelTable("t", 2, cache_rows=1).lookup(torch.arange(9))
        table = asyncckpt.HashTable("t", 2)
        table.lookup(torch.arange(9))
        with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
            for step in (3, 4, 5):
                table.embedding.fill_(step)
                saver.save_async(step).result(60)
    assert [warning.filename for warning in seen] == [__file__] * len(seen)
    for text in ("replace its files", "blocks until", "periodic save failed", "cache of table", "written in place"):
        assert any(text in str(warning.message) for warning in seen), text


def test_all_warnings_go_through_one_function() -> None:
    package = Path(asyncckpt.__file__).parent
    found = [str(path.relative_to(package)) for path in package.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert found == ["errors.py"]
