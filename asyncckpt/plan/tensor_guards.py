"""One call that tells whether thousands of tensors have the same types, shapes, strides, dtypes, devices as before.

torch.compile asks the same before it runs what it has compiled, in C++. That is not public, so nothing hangs on it:
where it is missing or says no, facts are compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch


def guards_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """What tells of tensors, given as its arguments, whether they are like these; None where torch has no such thing.

    It never says yes when a type, shape, stride, dtype, device, layout, conjugate or negative bit differs, and may say
    no when nothing of this does (a tensor that occurs twice, another requires_grad). Holds no tensor.
    """
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        found = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return cast("Callable[..., bool]", found.check) if found.check(*tensors) is True else None
    except Exception:  # Whatever another version of torch makes of this.
        return None
