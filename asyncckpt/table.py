"""The table protocol: what a table of your own has to offer, and may offer, to be saved and loaded.

A table is anything with the methods of Table; nothing needs to be derived from it. `asyncckpt/model/table.py` says what
is called when, and docs/table-suite.md how asyncckpt.testing.TableSuite checks an implementation.

    has to offer           Table, with TableCut, TableLoad, and a TableSchema of Columns that have Roles
    marks of written rows  TracksRows with CutVersion; TracksIds for removed ids: for deltas and for refreshed saves
    a deferred cut         DeferredCut, OverlaidCut, CacheCopy: training goes on while rows are exported
    sharding               OwnsIds: a load hands over only these ids; HoldsRange: consecutive ids, a part of a whole;
                           Replicated: all ids, with the same rows on every rank; CountsIds, IdsHeld
    loads                  OrderedLoad, ChecksLoad
    other tables           HasCompanions: saved and loaded with this one
"""

from asyncckpt.model.table import (
    CacheCopy,
    ChecksLoad,
    Column,
    CountsIds,
    CutVersion,
    DeferredCut,
    HasCompanions,
    HoldsRange,
    IdsHeld,
    OrderedLoad,
    OverlaidCut,
    OwnsIds,
    Replicated,
    Role,
    Table,
    TableCut,
    TableLoad,
    TableSchema,
    TracksIds,
    TracksRows,
)

__all__ = [
    "CacheCopy",
    "ChecksLoad",
    "Column",
    "CountsIds",
    "CutVersion",
    "DeferredCut",
    "HasCompanions",
    "HoldsRange",
    "IdsHeld",
    "OrderedLoad",
    "OverlaidCut",
    "OwnsIds",
    "Replicated",
    "Role",
    "Table",
    "TableCut",
    "TableLoad",
    "TableSchema",
    "TracksIds",
    "TracksRows",
]
