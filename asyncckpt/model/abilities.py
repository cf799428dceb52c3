"""What a cut or a source offers beyond its protocol, asked once per class: an isinstance with a Protocol takes 50
microseconds, and a save asks many times while training waits.
"""

from __future__ import annotations

from typing import TypeGuard

from asyncckpt.model.source import ByteSource, DeviceSource
from asyncckpt.model.table import OpenCut, OverlaidCut, TableCut, TracksIds, TracksRows

_offers: dict[tuple[type, type], bool] = {}


def tracks_rows(cut: TableCut) -> TypeGuard[TracksRows]:
    """Whether the table knows which rows were written since an earlier cut."""
    return _offers_all(cut, TracksRows)


def tracks_ids(cut: TableCut) -> TypeGuard[TracksIds]:
    """Whether the table also knows which rows were given to another id."""
    return _offers_all(cut, TracksIds)


def is_overlaid(cut: TableCut) -> TypeGuard[OverlaidCut]:
    """Whether the table has a cache level over its storage."""
    return _offers_all(cut, OverlaidCut)


def can_stay_open(cut: TableCut) -> TypeGuard[OpenCut]:
    """Whether the table can be exported behind the fence."""
    return _offers_all(cut, OpenCut)


def is_on_device(source: ByteSource) -> TypeGuard[DeviceSource]:
    """Whether the source lies on a device, from where it is fetched with others."""
    return _offers_all(source, DeviceSource)


def _offers_all(owner: object, protocol: type) -> bool:
    key = (type(owner), protocol)
    if key not in _offers:
        _offers[key] = isinstance(owner, protocol)
    return _offers[key]
