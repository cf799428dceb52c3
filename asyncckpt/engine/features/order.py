"""The features of a Saver in the order in which a save calls them, and why."""

from __future__ import annotations

from collections.abc import Mapping

from asyncckpt.engine.save.feature import SaveFeature

ORDER = {
    "events": "the others note how long they take",
    "ranks": "what other ranks write is neither cut nor planned, and decides what a delta may leave out",
    "filters": "they choose how the save is written, as deltas do",
    "deltas": "which rows are captured follows from what this rank writes",
    "steps": "what has been captured until here is what steps of optimizers wait for",
    "uploads": "a step is to be uploaded before retention looks what may go",
    "retention": "it removes what none of the others needs any more",
}


def in_order(features: Mapping[str, SaveFeature]) -> tuple[SaveFeature, ...]:
    """Return features by their names in ORDER."""
    return tuple(features[name] for name in ORDER if name in features)
