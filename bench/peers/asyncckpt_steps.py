"""asyncckpt with `optimizers=`: what only steps change is copied behind the call, and the next step waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.peers.asyncckpt import Asyncckpt
from bench.state import State


class AsyncckptSteps(Asyncckpt):
    hashtables = False

    def _optimizers(self, state: State) -> Sequence[torch.optim.Optimizer]:
        return state.optimizers


PEER = AsyncckptSteps
