"""Optimizers for the tables under HashEmbedding modules, after those of torch.optim and after FTRL-Proximal.

Each says its formula; csrc/include/asyncckpt.h has the order of its operations. They compute in float32, or in float64
where a column is that, so a float32 slot of a float16 table loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.native import Rule
from asyncckpt.tables.row_update import RuleStep
from asyncckpt.tables.sparse_optimizer import Modules, SparseOptimizer, read_betas, read_flag, read_positive

# The rule of FTRL divides by lr, in float32.
LR_MIN = float(np.finfo(np.float32).tiny)


class SparseSGD(SparseOptimizer):
    """torch.optim.SGD on rows that got a gradient: `row -= lr * gradient`, with momentum and weight decay if asked.

    momentum needs an optimizer slot `momentum_buffer` as wide as the embedding. slots renames it.
    """

    _slot_parts = ("momentum_buffer",)
    _readers: ClassVar[Mapping[str, Callable[..., Any]]] = {"nesterov": read_flag}

    def __init__(
        self,
        modules: Modules,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        slots: Mapping[str, str] | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(modules, defaults, slots)
        if nesterov and not momentum:  # As torch.optim.SGD says; in a group, it does without too.
            raise UsageError("nesterov of a sparse optimizer needs a momentum", found=momentum, expected="above 0")

    def _slots_used(self, group: dict[str, Any]) -> Sequence[str]:
        return group["slots"] if _momentum(group) else ()

    def _rule_step(self, group: dict[str, Any], steps_count: int) -> RuleStep:
        numbers = group["lr"], group["weight_decay"], _momentum(group), float(group["nesterov"])
        return RuleStep(Rule.SGD, numbers, tuple(self._slots_used(group)))


class SparseAdagrad(SparseOptimizer):
    """torch.optim.Adagrad on rows that got a gradient; the sums of squares are the optimizer slot `sum`.

    A slot as wide as the embedding gives Adagrad; one of row shape () gives row-wise Adagrad, which adds the mean
    square of the row's gradient. The sums begin with the fill of the slot. slots renames it.
    """

    _slot_parts = ("sum",)
    _may_be_rowwise = True

    def __init__(
        self,
        modules: Modules,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        *,
        slots: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(modules, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}, slots)

    def _rule_step(self, group: dict[str, Any], steps_count: int) -> RuleStep:
        lr = group["lr"] / (1 + (steps_count - 1) * group["lr_decay"])
        return RuleStep(Rule.ADAGRAD, (lr, group["weight_decay"], group["eps"]), tuple(group["slots"]))


class SparseAdam(SparseOptimizer):
    """Lazy Adam: torch.optim.Adam on rows that got a gradient, with one step count for a table's bias correction.

    The moments are the optimizer slots `exp_avg` and `exp_avg_sq`, as wide as the embedding; `exp_avg_sq` of row shape
    () gives row-wise Adam, whose second moment is that of the row's mean square. slots renames them. weight_decay is
    added to the gradient, as torch.optim.Adam does, and eps to the root of the corrected second moment: torch's own
    SparseAdam adds it before the correction.
    """

    _slot_parts = ("exp_avg", "exp_avg_sq")
    _may_be_rowwise = True
    _readers: ClassVar[Mapping[str, Callable[..., Any]]] = {"betas": read_betas}
    _decay_is_decoupled: ClassVar[bool] = False

    def __init__(
        self,
        modules: Modules,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        slots: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(modules, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, slots)

    def _rule_step(self, group: dict[str, Any], steps_count: int) -> RuleStep:
        (beta1, beta2), lr, weight_decay = group["betas"], group["lr"], group["weight_decay"]
        kept = 1 - lr * weight_decay if self._decay_is_decoupled else 1.0
        numbers = (
            lr / (1 - beta1**steps_count),
            0.0 if self._decay_is_decoupled else weight_decay,
            kept,
            1 - beta1,
            beta2,
            1 - beta2,
            1 / math.sqrt(1 - beta2**steps_count),
            group["eps"],
        )
        return RuleStep(Rule.ADAM, numbers, tuple(group["slots"]))


class SparseAdamW(SparseAdam):
    """SparseAdam with decoupled weight decay, as torch.optim.AdamW: touched rows are first scaled by 1 - lr * decay."""

    _decay_is_decoupled = True

    def __init__(
        self,
        modules: Modules,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        slots: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(modules, lr, betas, eps, weight_decay, slots=slots)


class SparseFTRL(SparseOptimizer):
    """FTRL-Proximal (McMahan et al., 2013) on rows that got a gradient, with alpha = lr.

    The squares are the optimizer slot `accumulator`, z is `linear`, both as wide as the embedding; slots renames them.
    l1 makes weights exactly 0. lr is above 0. In steps in which a scheduler has it at 0 or below, rows stay as they
    are, slots too.
    """

    _slot_parts = ("accumulator", "linear")
    _readers: ClassVar[Mapping[str, Callable[..., Any]]] = {"lr": read_positive}

    def __init__(
        self,
        modules: Modules,
        lr: float = 1e-2,
        l1: float = 0.0,
        l2: float = 0.0,
        beta: float = 0.0,
        *,
        slots: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(modules, {"lr": lr, "l1": l1, "l2": l2, "beta": beta}, slots)

    def _rule_step(self, group: dict[str, Any], steps_count: int) -> RuleStep | None:
        if group["lr"] < LR_MIN:
            return None
        numbers = 1 / group["lr"], group["l1"], group["l2"] + group["beta"] / group["lr"]
        return RuleStep(Rule.FTRL, numbers, tuple(group["slots"]))


def _momentum(group: dict[str, Any]) -> float:
    """Return the momentum; 0 for one that float32 takes for 0."""
    return group["momentum"] if np.float32(group["momentum"]) else 0.0
