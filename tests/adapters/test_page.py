"""The snippets of docs/adapters.md run; tests/torchrec runs the one that needs TorchRec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"


@pytest.mark.usefixtures("own_registry")
def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    first, dense_kernels, last = snippets()
    assert "class SpreadMoments" in dense_kernels
    for snippet in (first, last):
        exec(compile(snippet, str(PAGE), "exec"), namespace)
    assert list(namespace["tables"]) == ["user"]


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
