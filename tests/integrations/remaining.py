"""Where a resumed run does not come to what the whole one does: it then comes to what the library's own saving does.

The one list of them, by the class of the callback; the matrices of callbacks refuse every difference that is not in it,
and print those that they have met.
"""

from __future__ import annotations

REMAINING: dict[str, str] = {
    "BackboneFinetuning": "Lightning unfreezes a backbone when one epoch begins, and not where a later one is resumed",
}
MET: dict[str, set[str]] = {}


def differing(kind: str, facts: set[str]) -> bool:
    """Return whether a class may differ in these facts as its library's own saving does; note it if so."""
    if kind in REMAINING:
        MET.setdefault(kind, set()).update(facts)
    return kind in REMAINING
