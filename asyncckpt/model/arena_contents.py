"""What an arena holds of tables after a snapshot, so that the next snapshot copies only what was written since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncckpt.model.row_places import RowPlaces
from asyncckpt.model.table import CutVersion


@dataclass(frozen=True)
class TableContents:
    """All rows of a table as they were at the cut `version` (None: it has no marks), each at its place.

    fingerprints: by device, the fingerprints of all rows there, if they were computed.
    """

    version: CutVersion | None
    places: RowPlaces
    fingerprints: Mapping[int, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ArenaContents:
    """The tables by name. `layout` says where they are; contents of another layout cannot be used."""

    layout: object
    tables: Mapping[str, TableContents]
