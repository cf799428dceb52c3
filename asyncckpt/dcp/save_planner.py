"""A SavePlanner that plans only what has changed: DCP's default one, whose plans are kept from save to save.

For thousands of tensors DCP's planning takes longer than the writing, and holds the interpreter lock meanwhile. While
nothing changes its name, shape, dtype or placement, this planner sends no plan:

1. A rank whose state has the facts of a plan that it has finished before, for the same coordinator, sends the token of
   that plan instead. A planner is not told for which ranks it plans. So the coordinator is taken to be the one that the
   checkpoint's path last had, or the only one that there was; and a rank that plans for itself is its own.
2. The coordinator plans again unless all ranks have sent the same token and it knows that. Else it puts in, for every
   token, what that rank had sent when the token was made.
3. The plans that go out carry the token, and nothing more when no rank had changed.
4. A rank that sent a token and was not answered (the save has failed) sends its plan in full the next time. So does one
   that the coordinator could not understand.

DCP's own `enable_plan_caching` is not used: a save that fails between planning and writing leaves it with plans that
one side has and the other has not.
"""

from __future__ import annotations

import dataclasses
import inspect
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from asyncckpt.errors import ConflictError

# A rank forgets a plan before the coordinator does.
RANK_PLANS_MAX = 4
COORDINATOR_PLANS_MAX = 16
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class PlanToken:
    """In the planner_data of a plan: the plan of this token, known to the process `coordinator`. Only plain values."""

    token: str
    rank: int
    coordinator: str = ""


@dataclass
class _Finished:
    """On a rank: a plan that it has finished, and what it had sent for it."""

    facts: Any
    local: SavePlan
    final: SavePlan
    token: PlanToken
    path: object
    is_coordinator: bool
    is_unanswered: bool = False

    def is_replaced_by(self, newer: _Finished) -> bool:
        return self.token.coordinator == newer.token.coordinator and bool(self.facts == newer.facts)


@dataclass(frozen=True)
class _Planned:
    """On the coordinator: what all ranks had sent, and what became of it."""

    local: list[SavePlan]
    final: list[SavePlan]
    metadata: Metadata


@dataclass
class _Memory:
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    finished: list[_Finished] = field(default_factory=list)
    planned: OrderedDict[str, _Planned] = field(default_factory=OrderedDict)


# Of the process: most callers make a planner for every save.
_memory = _Memory()


class SavePlanner(DefaultSavePlanner):
    """DefaultSavePlanner, but cheap for a state that has the shape of an earlier one. For any StorageWriter.

    flatten_state_dict, flatten_sharded_tensors, dedup_save_to_lowest_rank  as DCP's, where this torch has them

    Plans of states with ShardedTensors, or other tensors of unknown kinds, are made again each time. Source of the
    interface: torch.distributed.checkpoint.DefaultSavePlanner.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_save_to_lowest_rank: bool = False,
    ) -> None:
        given: dict[str, Any] = {
            "flatten_state_dict": flatten_state_dict,
            "flatten_sharded_tensors": flatten_sharded_tensors,
            "dedup_save_to_lowest_rank": dedup_save_to_lowest_rank,
        }
        known = inspect.signature(DefaultSavePlanner.__init__).parameters
        super().__init__(**{name: value for name, value in given.items() if name in known})
        self._options = tuple(given.values())
        self._path: object = None
        self._facts: Any = None
        self._known: _Finished | None = None
        self._local: SavePlan | None = None

    @property
    def local_items(self) -> list[WriteItem] | None:
        """What this rank has planned to write of its state, before DCP gave replicas to one rank each."""
        return None if self._local is None else self._local.items

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._path = getattr(storage_meta, "checkpoint_id", None)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self._facts = _facts(self.state_dict, self.mappings, self._options)
        self._known = known = None if self._facts is None else self._finished_before()
        if known is not None and known.is_unanswered:
            known.is_unanswered = False
            self._known = known = None
        if known is None:
            self._local = self.plan = super().create_local_plan()
            return self._local
        known.is_unanswered = True
        self._local = self.plan = known.local
        return SavePlan([], planner_data=known.token)

    def _finished_before(self) -> _Finished | None:
        """Return the newest plan of this state that the coordinator of this save knows, as far as that is known."""
        found = [
            item
            for item in _memory.finished
            if item.is_coordinator == self.is_coordinator and item.facts == self._facts
        ]
        here = [item for item in found if item.path == self._path]
        if len({item.token.coordinator for item in found}) > 1:
            found = []
        return next(iter(here or found), None)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tokens = [plan.planner_data for plan in all_plans]
        sent = {token.token for token in tokens if isinstance(token, PlanToken)}
        if len(sent) == 1 and all(isinstance(token, PlanToken) for token in tokens):
            (token,) = sent
            planned = _memory.planned.get(token)
            if planned is not None and len(planned.local) == len(all_plans):
                _memory.planned.move_to_end(token)
                self.global_plan, self.metadata = planned.final, dataclasses.replace(planned.metadata)
                answers = [SavePlan([], planner_data=_token(token, rank)) for rank in range(len(all_plans))]
                return answers, self.metadata
        return self._plan_anew([_in_full(plan) for plan in all_plans])

    def _plan_anew(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        final, metadata = super().create_global_plan(all_plans)
        token = uuid.uuid4().hex
        _memory.planned[token] = _Planned(local=all_plans, final=final, metadata=dataclasses.replace(metadata))
        while len(_memory.planned) > COORDINATOR_PLANS_MAX:
            _memory.planned.popitem(last=False)
        return [
            dataclasses.replace(plan, planner_data=_token(token, rank)) for rank, plan in enumerate(final)
        ], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        token = new_plan.planner_data
        known = self._known
        if known is not None and isinstance(token, PlanToken) and token == known.token:
            known.is_unanswered = False
            self.plan = known.final
        else:
            self.plan = super().finish_plan(new_plan)
            if known is not None:
                known.is_unanswered = False
            if self._facts is not None and isinstance(token, PlanToken) and self._local is not None:
                finished = _Finished(
                    self._facts,
                    local=self._local,
                    final=self.plan,
                    token=token,
                    path=self._path,
                    is_coordinator=self.is_coordinator,
                )
                others = [item for item in _memory.finished if not item.is_replaced_by(finished)]
                _memory.finished = [finished, *others][:RANK_PLANS_MAX]
        self._known = None
        return self.plan


def _token(token: str, rank: int) -> PlanToken:
    return PlanToken(token, rank, _memory.process)


def _in_full(plan: SavePlan) -> SavePlan:
    """Return a plan as its rank had sent it."""
    token = plan.planner_data
    if not isinstance(token, PlanToken):
        return plan
    planned = _memory.planned.get(token.token)
    if planned is None or token.rank >= len(planned.local):
        raise ConflictError(
            f"rank {token.rank} has sent the token of a plan that the coordinator does not know",
            hint="the next save makes a new plan",
        )
    return planned.local[token.rank]


def _facts(state: dict[str, Any], mappings: Any, options: tuple[Any, ...]) -> Any:
    """Return what a plan depends on; None where that is not known."""
    values = list(state.values())
    types = list(map(type, values))
    plain, spread = [], []
    for value, kind in zip(values, types, strict=True):
        if kind in _PLAIN_TENSORS:
            plain.append((value.size(), value.dtype, value.requires_grad))
        elif _is_dtensor(value):
            spread.append((value.size(), value.dtype, value.requires_grad, value.placements, value.device_mesh))
        elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return None
    kinds = [kind if issubclass(kind, torch.Tensor) else None for kind in types]
    return list(state), kinds, plain, spread, dict(mappings), options


def _is_dtensor(value: Any) -> bool:
    """Judge by the name of the class, because its module has moved between versions of torch."""
    return type(value).__name__ == "DTensor" and hasattr(value, "placements") and hasattr(value, "device_mesh")
