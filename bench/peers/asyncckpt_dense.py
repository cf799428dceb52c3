"""asyncckpt on plain tensors alone: all of them are copied in the call."""

from __future__ import annotations

from bench.peers.asyncckpt import Asyncckpt


class AsyncckptDense(Asyncckpt):
    hashtables = False


PEER = AsyncckptDense
