"""The snippets of the pages on trainers do what the pages say, with the real packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_snippets import run_page


@pytest.mark.parametrize("page", ["docs/transformers.md", "docs/lightning.md"])
def test_snippets_do_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)
