"""The check of what an error says sees an error that does not say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt.errors import IOFailedError, PeerError
from tests.worlds.told import check_told

GOOD = "object cannot be read: 's3://bucket/key': the store refused: 403 AccessDenied"
HINT = "these credentials lack a permission"
SAYS = ("s3://bucket/key", "403 AccessDenied")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("object cannot be read: the store refused: 403 AccessDenied", HINT),
        ("object cannot be read: 's3://bucket/key'", HINT),
        (GOOD, None),
        (f"{GOOD}: secret-of-the-key", HINT),
        (f"{GOOD}\nwith a second line", HINT),
        (f"{GOOD}: PermissionError(13)", HINT),
        (f"{GOOD}: <object object at 0x7f00>", HINT),
        (GOOD + ", again" * 200, HINT),
    ],
)
def test_the_check_sees_what_is_not_told(wrong: str, hint: str | None) -> None:
    check_told(IOFailedError(GOOD, hint=HINT), "test", *SAYS, hidden=("secret",))
    with pytest.raises(AssertionError):
        check_told(IOFailedError(wrong, hint=hint), "test", *SAYS, hidden=("secret",))


def test_an_error_of_a_rank_leads_to_its_log_unless_its_cause_says_what_to_do() -> None:
    assert str(PeerError("aborted", rank=2, cause="silent")).endswith(
        "(see the log of rank 2, and whether it still runs)"
    )
    assert str(PeerError("aborted", rank=2, cause="it says no (say yes)")) == "aborted: it says no (say yes)"


def test_what_is_told_is_noted_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCKPT_ERROR_TEXTS", str(tmp_path / "page"))
    attempt = "0123456789abcdef" * 2
    check_told(f"step 1 of {tmp_path}/{attempt} is not there (save it)", "disk", shown={f"{tmp_path}": "DIR"})
    assert (tmp_path / "page").read_text() == "disk: step 1 of DIR/ATTEMPT is not there (save it)\n"
