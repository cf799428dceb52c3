"""Which tables a state dict of torch belongs to: it does not hold them, so their modules note them in its metadata.

A note is plain text, so a state dict can be pickled as before. It names a table of this process, as long as it lives.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from asyncckpt.errors import UsageError
from asyncckpt.format.module_facts import NOTED_TABLES as KEY
from asyncckpt.format.tree import metadata_in

GIVE_MODULE = "give the module instead of its state_dict()"
_notes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_tables: WeakValueDictionary[str, Any] = WeakValueDictionary()


def note_tables(state: Any, prefix: str, tables: Mapping[str, Any]) -> None:
    """Note the tables of a module in its state dict: by their names, "" where it has the name of the module.

    Called where torch fills the part of the module with this prefix.
    """
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        metadata.setdefault(prefix[:-1], {})[KEY] = {name: _note_of(table) for name, table in tables.items()}


def noted_tables(state: Any) -> dict[str, Any]:
    """Return the tables that a state dict belongs to, named as `tables_of` does it; none for other mappings.

    None as the table: it is of another process, or gone.
    """
    found: dict[str, Any] = {}
    for path, noted in (metadata_in(state) or {}).items():
        tables = noted.get(KEY) if isinstance(noted, Mapping) else None
        for name, note in tables.items() if isinstance(tables, Mapping) else ():
            table = _tables.get(note)
            if table is None or not any(table is other for other in found.values()):
                found[".".join(filter(None, (path, name))) or getattr(table, "name", KEY)] = table
    return found


def with_notes(metadata: Mapping[str, Any], state: Any) -> OrderedDict[str, Any]:
    """Return `_metadata` with the notes that those of a state dict have."""
    found = OrderedDict(metadata)
    for path, noted in (metadata_in(state) or {}).items():
        if isinstance(noted, Mapping) and KEY in noted:
            found[path] = {**found.get(path, {}), KEY: noted[KEY]}
    return found


def check_not_copied(state: Mapping[str, Any]) -> None:
    """Raise UsageError for a mapping that may be the copy of a state dict which belongs to tables: it has lost them."""
    if _notes and metadata_in(state) is None:
        raise UsageError(
            "state has no tables, and does not say that its modules have none, as a copy of a state_dict()",
            found=sorted({table.name for table in list(_notes)})[:8],
            hint=f"{GIVE_MODULE}; a module without tables, too",
        )


def _note_of(table: Any) -> str:
    try:
        note = _notes.setdefault(table, uuid.uuid4().hex)
        _tables[note] = table
    except TypeError:  # A class of somebody else's, without weak references.
        note = ""
    return note
