"""What a cut or a source offers beyond its protocol, checked once per class.

An isinstance with a Protocol takes 50 microseconds, and a save checks often while training waits.
"""

from __future__ import annotations

from typing import TypeGuard

from asyncckpt.model.source import ByteSource, DeviceSource
from asyncckpt.model.table import DeferredCut, OverlaidCut, TableCut, TracksIds, TracksRows

_offers: dict[tuple[type, type], bool] = {}


def tracks_rows(cut: TableCut) -> TypeGuard[TracksRows]:
    """Return whether the table knows which rows were written since an earlier cut."""
    return _offers_all(cut, TracksRows)


def tracks_ids(cut: TableCut) -> TypeGuard[TracksIds]:
    """Return whether the table also knows which rows were assigned to another id."""
    return _offers_all(cut, TracksIds)


def is_overlaid(cut: TableCut) -> TypeGuard[OverlaidCut]:
    """Return whether the table has a cache level over its storage."""
    return _offers_all(cut, OverlaidCut)


def can_be_deferred(cut: TableCut) -> TypeGuard[DeferredCut]:
    """Return whether the export of the table can be deferred behind the fence."""
    return _offers_all(cut, DeferredCut)


def is_on_device(source: ByteSource) -> TypeGuard[DeviceSource]:
    """Return whether the source is on a device, from which it is fetched together with others."""
    return _offers_all(source, DeviceSource)


def _offers_all(owner: object, protocol: type) -> bool:
    key = (type(owner), protocol)
    if key not in _offers:
        _offers[key] = isinstance(owner, protocol)
    return _offers[key]
