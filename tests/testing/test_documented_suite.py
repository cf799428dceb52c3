"""The example of docs/table-suite.md passes as it is printed, and the page names every hook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asyncckpt.testing.case import TableCase

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "table-suite.md").read_text(encoding="utf-8")


def _example() -> type[Any]:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, "docs/table-suite.md", "exec"), namespace)
    example: type[Any] = namespace["TestMyTable"]
    return example


TestDocumentedTable = _example()


def test_the_page_names_every_hook() -> None:
    inherited = {"trained", "train_steps", "image", "inside", "weight_column"}
    hooks = {name for name in vars(TableCase) if not name.startswith(("_", "assert_"))} - inherited
    assert [name for name in sorted(hooks) if f"`{name}" not in PAGE] == []
