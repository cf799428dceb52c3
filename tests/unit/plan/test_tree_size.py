"""Values whose walk would not end are refused, without a walk."""

from __future__ import annotations

from typing import Any

import pytest

from asyncckpt.errors import UnsupportedError
from asyncckpt.format import limits
from asyncckpt.plan.tree_size import check_tree_size


def test_entries_count_as_often_as_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VALUES_MAX", 100)
    shared = list(range(8))  # With itself, nine.
    check_tree_size({"a": [shared] * 10}, owner="it")  # 90, the list, the key and the dict.
    with pytest.raises(UnsupportedError, match=r"it holds containers that hold each other too often, found 102"):
        check_tree_size({"a": [shared] * 11}, owner="it")


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_what_grows_without_end_is_refused(kind: type) -> None:
    level: Any = [1]
    for _ in range(100):
        level = {n: level for n in range(10)} if kind is dict else kind([level] * 10)
    with pytest.raises(UnsupportedError, match="too often"):
        check_tree_size({"a": level}, owner="it")


def test_what_holds_itself_or_is_too_deep_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = [loop]
    with pytest.raises(UnsupportedError, match="too often"):
        check_tree_size(loop, owner="it")
    deep: list[Any] = []
    for _ in range(limits.TREE_DEPTH_MAX + 1):
        deep = [deep]
    with pytest.raises(UnsupportedError, match="nested too deeply"):
        check_tree_size(deep, owner="it")
