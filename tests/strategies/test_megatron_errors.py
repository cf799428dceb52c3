"""Errors of ours are Megatron's exception too, without Megatron: its module is stood for by one with the exception."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from asyncckpt import Saver, errors
from asyncckpt.errors import CheckpointError, DeadlineError, IndeterminateError, PeerInDoubtError, UsageError
from asyncckpt.strategies.megatron_errors import CORE, megatrons_errors
from asyncckpt.strategies.running_save import RunningSave

pytestmark = pytest.mark.any_core


class CheckpointingException(Exception):
    """As in megatron.core.dist_checkpointing.core."""


@pytest.fixture
def _core(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = CORE.split(".")
    for count in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:count]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.CheckpointingException = CheckpointingException  # type: ignore[attr-defined]


def raised(error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as caught, megatrons_errors():
        raise error
    assert caught.value is error
    return error


def kinds() -> list[type[CheckpointError]]:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CheckpointError)]
    assert len(found) > 12
    return found


def made(kind: type[CheckpointError]) -> CheckpointError:
    more: dict[type, dict[str, Any]] = {
        errors.IndeterminateError: {"resolve": lambda: True},
        errors.PeerError: {"rank": 1, "cause": "gone"},
        errors.PeerInDoubtError: {"rank": 1, "cause": "gone", "resolve": lambda: True},
    }
    return kind("it failed", **more.get(kind, {}))


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_tree_becomes_both(kind: type[CheckpointError]) -> None:
    error = made(kind)
    text, facts = str(error), dict(error.__dict__)
    raised(error)
    assert isinstance(error, kind)
    assert isinstance(error, CheckpointingException)
    assert (type(error).__name__, type(error).__module__) == (kind.__name__, kind.__module__)
    assert (str(error), error.__dict__) == (text, facts)
    assert type(raised(made(kind))) is type(error)


@pytest.mark.usefixtures("_core")
def test_an_error_that_is_both_is_so_in_another_process() -> None:
    error = raised(PeerInDoubtError("it", rank=3, cause="gone", resolve=lambda: True))
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), found.rank) == (str(error), 3)
    assert isinstance(found, IndeterminateError)


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), OSError("y")])
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    kind = type(error)
    assert type(raised(error)) is kind


@pytest.mark.usefixtures("_core")
def test_a_request_that_failed_raises_both(tmp_path: Path) -> None:
    def fail(blocks: list[Any]) -> list[Any]:
        raise ValueError("no")

    saver = Saver(path=tmp_path / "c", tensors={"x": torch.ones(3)}, filter_func=fail)
    running = RunningSave(saver, saver.save_async(), errors=megatrons_errors)
    running()
    with pytest.raises(CheckpointingException, match="no") as failed:
        running.result()
    assert isinstance(failed.value, UsageError)
    assert isinstance(running.error(), CheckpointingException)
    with pytest.raises(CheckpointingException, match="another process"):
        pickle.loads(pickle.dumps(running))()


def _errors_without() -> list[Callable[[], CheckpointError]]:
    return [lambda: UsageError("a"), lambda: DeadlineError("b")]


@pytest.mark.parametrize("make", _errors_without())
def test_where_megatron_is_gone_errors_are_ours(
    make: Callable[[], CheckpointError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what a process without Megatron gets from one that has it can be read there."""
    monkeypatch.setitem(sys.modules, CORE, None)
    error = make()
    kind = type(error)
    assert type(raised(error)) is kind
