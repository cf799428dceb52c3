"""What the page is made of: data in which no markup begins, a policy that names what may run, nothing foreign."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt.cli import run
from asyncckpt.observe.facts import FIELDS, TABLES_MAX, report_of
from asyncckpt.observe.page import as_data, page_of
from tests.observed.directories import HOSTILE, long_run

RUN = Path("/data/run")


class Elements(HTMLParser):
    """The elements of a page as a browser sees them: their attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self._is_inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._is_inside = True

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.texts[len(self.found) - 1] = self.texts.get(len(self.found) - 1, "") + data

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(facts, self.texts.get(n, "")) for n, (name, facts) in enumerate(self.found) if name == tag]


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(report["fields"], row, strict=True)) for row in report["rows"]]


@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_names_change_no_element_of_the_page(title: str) -> None:
    plain = Elements(page_of(report_of(RUN, long_run(30)), title="run"))
    hostile = Elements(page_of(report_of(RUN / title, long_run(30, names=HOSTILE)), title=title))
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in plain.found]
    [data] = [text for facts, text in hostile.of("script") if facts.get("type") == "application/json"]
    assert sorted(json.loads(data)["tables"]) == sorted(HOSTILE)


def test_data_that_is_not_escaped_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.observe.page.as_data", json.dumps)
    plain = Elements(page_of(report_of(RUN, long_run(30)), title="run"))
    hostile = Elements(page_of(report_of(RUN, long_run(30, names=HOSTILE)), title="run"))
    assert [tag for tag, _ in hostile.found] != [tag for tag, _ in plain.found]


@pytest.mark.parametrize("text", [*HOSTILE, "<!--<script>", "\ud800", "é"])
def test_data_come_back(text: str) -> None:
    data = as_data({text: [text]})
    assert json.loads(data) == {text: [text]}
    assert re.search("[<>&]", data) is None


@pytest.mark.parametrize("is_live", [False, True])
def test_the_policy_names_what_runs_and_nothing_comes_from_elsewhere(is_live: bool) -> None:
    elements = Elements(page_of(None if is_live else report_of(RUN, {}), title="run"))
    [policy] = [facts["content"] for facts, _ in elements.of("meta") if "http-equiv" in facts]
    allowed = dict(part.strip().split(" ", 1) for part in str(policy).split(";"))
    [script] = [text for facts, text in elements.of("script") if "type" not in facts]
    [(_, style)] = elements.of("style")
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[name] == f"'sha256-{digest}'"
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == ("'self'" if is_live else "'none'")
    linked = [facts.get(name) for _, facts in elements.found for name in ("src", "href", "style", "onerror")]
    assert [value for value in linked if value is not None] == ["data:,"]
    assert "http" not in style + script.replace("http://www.w3.org/2000/svg", "")


def test_a_report_says_what_the_directory_says() -> None:
    found = long_run(200)
    report = report_of(RUN, found)
    rows = rows_of(report)
    assert (report["fields"], [row["step"] for row in rows]) == (FIELDS, list(found))
    for row, answer in zip(rows, found.values(), strict=True):
        if isinstance(answer, asyncckpt.CheckpointError):
            assert (row["kind"], row["error"]) == ("damaged", str(answer))
            continue
        assert row["bytes"] == answer.bytes
        assert row["upon"] == (answer.parents[0] if answer.parents else None)
        tables = {report["tables"][number]: rows for number, rows, _, _ in row["tables"]}
        assert tables == answer.tables
        times = answer.times
        assert row["stall"] == (None if times is None else times.stall_us)
        assert row["written"] == (None if times is None else times.written_us)


def test_5000_steps_of_many_tables_take_little() -> None:
    page = page_of(report_of(RUN, long_run(5000)), title="run")
    assert len(page) < 1_300_000
    many = report_of(RUN, long_run(100, names=tuple(f"table {number}" for number in range(1000))))
    assert (len(many["tables"]), many["more_tables"]) == (TABLES_MAX, 1000 - TABLES_MAX)
    assert len(as_data(many)) < 100_000 + 100 * TABLES_MAX * 30


def test_a_time_of_another_writer_is_unknown() -> None:
    [(step, answer)] = list(long_run(1).items())
    assert not isinstance(answer, asyncckpt.CheckpointError)
    report = report_of(RUN, {step: type(answer)(**{**vars(answer), "created": "yesterday"})})
    assert rows_of(report)[0]["created"] is None


def test_report_writes_one_file_and_says_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        asyncckpt.save(tmp_path / "run", {"a": 1}, step=step)
    page = tmp_path / "page.html"
    assert run(["report", str(tmp_path / "run"), "-o", str(page)]) == 0
    assert "2 checkpoints" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    manifest = tmp_path / "run/manifests/000000000002.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert run(["report", str(tmp_path / "run"), "-o", str(page)]) == 1
    assert "does not end as a manifest ends" in page.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["report", "{}/none"], 3, "none"),
        (["report", "{}/run", "-o", "{}/none/page.html"], 5, "cannot be written"),
        (["watch", "{}/run", "--port", "65536"], 2, "not a port"),
        (["watch", "{}/run", "--port", "x"], 2, "not a number"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    asyncckpt.save(tmp_path / "run", {"a": 1}, step=1)
    with pytest.raises(SystemExit) as ended:
        run([argument.format(tmp_path) for argument in arguments])
    assert ended.value.code == code
    assert said in capsys.readouterr().err
