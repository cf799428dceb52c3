"""Order between this thread's work and the stream on which a library's module prefetches rows into its cache.

FBGEMM and dynamicemb keep it as `prefetch_stream`, once there was a prefetch (TorchRec's pipelines). Nothing else
orders it with a save: a cut comes behind the prefetches before it, and those after it behind the fence. The host waits
for neither.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

_log = logging.getLogger("asyncckpt")


def follow_prefetch(module: Any) -> None:
    """Let the current stream wait until all rows are moved that prefetches so far move."""
    stream = getattr(module, "prefetch_stream", None)
    if stream is not None:
        _current(stream).wait_stream(stream)


def hold_prefetch_back(module: Any) -> None:
    """Let further prefetches wait for all that the current stream waits for: a fence. Never raises."""
    stream = getattr(module, "prefetch_stream", None)
    if stream is None:
        return
    try:
        stream.wait_stream(_current(stream))
    except RuntimeError as error:  # A lost device: whoever uses it next is told.
        _log.warning("asyncckpt: the stream of prefetches could not be ordered behind a save: %s", error)


def _current(stream: Any) -> Any:
    return torch.cuda.current_stream(stream.device)
