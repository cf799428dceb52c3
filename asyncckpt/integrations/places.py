"""Where the steps of a run are: on its disk, or, when that was lost, in the store to which it uploads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from asyncckpt.checkpoints import list_steps
from asyncckpt.errors import NotFoundError
from asyncckpt.options import UploadOptions


def steps_in(place: str | os.PathLike[str] | None) -> list[int]:
    """Return the steps of a directory or URL, ascending; none where there are no checkpoints, and in no place."""
    with suppress(NotFoundError):
        return [] if place is None or os.path.isfile(place) else list_steps(place)
    return []


def upload_url(checkpointing: Mapping[str, Any]) -> str | None:
    """Return the URL to which a Checkpointer with these arguments uploads."""
    upload = checkpointing.get("options", {}).get("upload")
    return upload.url if isinstance(upload, UploadOptions) else upload
