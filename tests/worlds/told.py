"""What whoever is woken by an error has to read in it: where, what was wanted, why there is none, and what to do next.

Tests walk over what can be in the way (disks, stores, ranks, memory), and give each error or line of a log to
`check_told`. With ASYNCCKPT_ERROR_TEXTS=file it is noted there, too: `make error-texts` prints each once, to be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from asyncckpt.errors import CheckpointError, with_earlier

LETTERS_MAX = 900
# What Python shows of itself, where a sentence is due.
INTERNALS = re.compile(r"Traceback|<class |<function |object at 0x|\[Errno|\b[A-Z]\w*(Error|Exception)\(|\n")
NEXT_STEP = re.compile(r"\([^()]*\w+ [^()]*\)")
ALWAYS_ANOTHER = (
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])"), "ATTEMPT"),
    (re.compile(r"\b\d+\.\d{3,}\b"), "N.N"),
    (re.compile(r"\b\d{6,}(?= bytes)"), "N"),
)


def check_told(
    error: CheckpointError | str,
    kind: str,
    *says: str | re.Pattern[str],
    is_mended: bool = False,
    hidden: Sequence[str] = (),
    shown: Mapping[str, str] = {},
) -> None:
    """Check an error, or a line of a log, of this kind: it says all of this, in one line, and what to do next.

    is_mended: it went well all the same, so nothing is to be done. hidden: what it must not say. shown: what stands on
    the page for texts that each run has its own of.
    """
    text = error if isinstance(error, str) else with_earlier(error)
    assert text == text.strip()
    for part in says:
        is_said = part in text if isinstance(part, str) else part.search(text)
        assert is_said, f"{part!r} is not in {text!r}"
    for secret in hidden:
        assert secret not in text, f"{secret!r} is in {text!r}"
    found = INTERNALS.search(text)
    assert found is None, f"{found[0]!r} is in {text!r}"
    assert len(text) <= LETTERS_MAX, f"nobody reads {len(text)} letters: {text!r}"
    hint = None if isinstance(error, str) else error.hint
    assert hint or is_mended or NEXT_STEP.search(text), f"no next step in {text!r}"
    _note(kind, text, shown)


def _note(kind: str, text: str, shown: Mapping[str, str]) -> None:
    if not (page := os.environ.get("ASYNCCKPT_ERROR_TEXTS")):
        return
    for own, word in shown.items():
        text = text.replace(own, word)
    for pattern, word in ALWAYS_ANOTHER:
        text = pattern.sub(word, text)
    with open(page, "a", encoding="utf-8") as file:
        file.write(f"{kind}: {text}\n")
