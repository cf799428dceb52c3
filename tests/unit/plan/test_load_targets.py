"""What a load fills: which leaves in place, which objects by a state dict."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncckpt.plan.load_targets import dense_targets


class Growing:
    """An object whose state dict is another at every call, as that of a sampler that notes who asked."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append(len(self.calls))
        return {"calls": list(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = list(state["calls"])


class CountingLinear(torch.nn.Linear):
    calls_count = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls_count += 1
        return super().state_dict(*args, **kwargs)


def test_objects_are_asked_for_their_state_once() -> None:
    """The second answer may be another one, and for state that is spread over ranks the ranks have to meet."""
    growing, module = Growing(), CountingLinear(2, 3)
    state = {"array": np.zeros(2), "sampler": growing, "model": module}
    targets = dense_targets(state, tables=iter(()))
    assert growing.calls == [0]
    assert module.calls_count == 1
    assert [item.name for item in targets.in_place] == ["array", "model.weight", "model.bias"]
    assert targets.in_place[0].pieces[0].tensor.data_ptr() == state["array"].ctypes.data
    assert [item.path for item in targets.rebuilt] == [("sampler",), ("model",)]


def test_an_object_inside_another_one_is_left_to_it() -> None:
    class Outer(Growing):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": Growing(), "level": 3}

    targets = dense_targets({"outer": Outer(), "epoch": 1}, tables=iter(()))
    assert [item.path for item in targets.rebuilt] == [("outer",)]
    assert targets.values == (("epoch",),)
    assert targets.rebuilt[0].values == {("outer", "inner", "calls", ("int", 0)): 0, ("outer", "level"): 3}
