"""Order this thread's work and the stream on which a library's module prefetches rows into its cache.

FBGEMM and dynamicemb have the attribute `prefetch_stream` after a prefetch (TorchRec's pipelines). Nothing else orders
it with a save: a cut waits for earlier prefetches, and later ones wait for its fence. The host waits for neither.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

_log = logging.getLogger("asyncckpt")


def follow_prefetch(module: Any) -> None:
    """Make the current stream wait for all prefetches that are queued."""
    stream = getattr(module, "prefetch_stream", None)
    if stream is not None:
        _current(stream).wait_stream(stream)


def hold_prefetch_back(module: Any) -> None:
    """Make further prefetches wait for the current stream, which waits for a fence. Never raises."""
    stream = getattr(module, "prefetch_stream", None)
    if stream is None:
        return
    try:
        stream.wait_stream(_current(stream))
    except RuntimeError as error:  # A lost device: its next use raises.
        _log.warning("asyncckpt: the stream of prefetches could not be ordered after a save: %s", error)


def _current(stream: Any) -> Any:
    return torch.cuda.current_stream(stream.device)
