"""Objects of a state: with a state dict of anything, with tied weights, and such as nobody should unpickle."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


class Stateful:
    """An object with a state dict, of anything; what it is given here is called when it is saved and loaded."""

    def __init__(self, state: Any = None, *, saving: Callable[[], Any] = int, loading: Callable[[], Any] = int) -> None:
        self.state, self.saving, self.loading = state, saving, loading

    def state_dict(self) -> Any:
        self.saving()
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loading()
        self.state = state


class TiedWeights(torch.nn.Module):
    def __init__(self, fill: float, *, rows: int = 40, dim: int = 30) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(rows, dim)
        self.lm_head = torch.nn.Linear(dim, rows, bias=False)
        self.lm_head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.fill_(fill)

    def untie(self) -> TiedWeights:
        self.lm_head.weight = torch.nn.Parameter(self.embed.weight.detach().clone())
        return self


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: object = "evil") -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)
