"""Names of the classes of optimizers and schedulers, which a checkpoint keeps so that a load can compare them.

Names alone: nothing is imported or made by them. Those of the base class and above say nothing, so they are left out.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

# Where torch has those that are derived from these.
CLASSES_OF: dict[type, tuple[ModuleType, ...]] = {
    torch.optim.Optimizer: (torch.optim,),
    lr_scheduler.LRScheduler: (lr_scheduler, swa_utils),
}
TABLE_OPTIMIZERS = frozenset(("SparseSGD", "SparseAdagrad", "SparseAdam", "SparseAdamW", "SparseFTRL"))


def is_known_class(name: str, base: type) -> bool:
    """Return whether torch, or asyncckpt.optim, has a class of this name derived from a base of `CLASSES_OF`."""
    return name in TABLE_OPTIMIZERS or any(hasattr(module, name) for module in CLASSES_OF[base])


def class_names(owner: Any) -> tuple[str, ...]:
    """Return the name of the class of an optimizer or scheduler, and of those that it is derived from, its own first.

    Empty for others, and for one with a load_state_dict of its own: that of a wrapper may be of anything.
    """
    base = next((base for base in CLASSES_OF if isinstance(owner, base)), None)
    torchs_load, own = torch.optim.Optimizer.load_state_dict, type(owner)
    is_wrapper = base is torch.optim.Optimizer and own.load_state_dict is not torchs_load
    if base is None or (is_wrapper and not hasattr(own, "_check_saved")):  # Those of tables are our own.
        return ()
    classes = type(owner).__mro__
    return tuple(cls.__name__ for cls in classes[: classes.index(base)])
