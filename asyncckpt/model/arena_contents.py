"""What an arena holds of tables after a snapshot, so that the next one copies only what was written since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncckpt.model.row_places import RowPlaces
from asyncckpt.model.table import CutVersion


@dataclass(frozen=True)
class TableContents:
    """All rows of a table as they were at the cut `version`, each at its place."""

    version: CutVersion
    places: RowPlaces


@dataclass(frozen=True)
class ArenaContents:
    """The tables by name. `layout` is the object that says where they lie; of another layout nothing can be used."""

    layout: object
    tables: Mapping[str, TableContents]
