"""One training run, made of pieces that a seed draws, and an exact image of all that it is.

A Case is a tuple of pieces, "module:lstm"; each draws by itself, so that a case with fewer of them is the same but for
what was taken away. Runs of one case differ only in the numbers that they begin with.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from asyncckpt.trainer_state import RngState
from tests.oracles.modules import MODULES, WIDTH
from tests.oracles.training import OPTIMIZERS, SCHEDULERS, VALUES, Held, HoldingTrainer
from tests.worlds.bits import raw_of

ROWS, GROWS_AT = 4, 2


def recomputed(module: nn.Module) -> Any:
    """Wrap a module as for recomputation, without it: what counts in `forward` would count twice."""
    return checkpoint_wrapper(module, checkpoint_fn=lambda inner, *given, **named: inner(*given, **named))


WRAPPERS: dict[str, Any] = {
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "recomputed": recomputed,
    "parallel": nn.DataParallel,
}
WHOLE_WRAPPERS = {f"whole_{name}": wrap for name, wrap in WRAPPERS.items()}
WHOLE_WRAPPERS["both"] = lambda module: recomputed(torch.compile(module, backend="eager"))
CHANGES = ("tie", "groups", "named", "grows", "reversed", "nested", "frozen_half", "used")
OBJECTS = ("scaler", "average", "ema", "random", "second_model", "trainer", "aliased", "history")
# How many of each a case has at the most.
COUNTS = {"module": 4, "optimizer": 2, "scheduler": 2, "value": 4, "wrapper": 2, "change": 3, "object": 4}
PIECES = (
    *(f"module:{name}" for name in MODULES),
    *(f"optimizer:{name}" for name in OPTIMIZERS),
    *(f"scheduler:{name}" for name in SCHEDULERS),
    *(f"value:{name}" for name in VALUES),
    *(f"wrapper:{name}" for name in (*WRAPPERS, *WHOLE_WRAPPERS)),
    *(f"change:{name}" for name in CHANGES),
    *(f"object:{name}" for name in OBJECTS),
)


@dataclass(frozen=True)
class RunCase:
    """What a run is made of. steps: how many were trained before the save."""

    pieces: tuple[str, ...]
    steps: int = 3

    @classmethod
    def drawn(cls, seed: int, pieces: tuple[str, ...] = PIECES) -> RunCase:
        draw = random.Random(seed)
        chosen: list[str] = []
        for kind, most in COUNTS.items():
            known = [name for name in pieces if name.startswith(f"{kind}:")]
            chosen += draw.sample(known, min(len(known), draw.randrange(most + 1)))
        return cls(tuple(chosen), draw.choice([0, 1, 3, 4]))

    def of(self, kind: str) -> list[str]:
        return [name.partition(":")[2] for name in self.pieces if name.startswith(f"{kind}:")]

    def has(self, piece: str) -> bool:
        return piece in self.pieces


class CaseModules(nn.Module):
    """The modules of a case, one after the other."""

    def __init__(self, case: RunCase) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = nn.ModuleList()
        for name in case.of("module"):
            made = MODULES[name](random.Random(name))
            # Some at a deeper level.
            self.body.append(nn.Sequential(nn.Tanh(), made) if random.Random(f"{name} deep").random() < 0.5 else made)
        if case.has("change:tie"):
            self.last = nn.Linear(WIDTH, WIDTH)
            self.last.weight = self.first.weight
            self.again = self.body[0] if self.body else self.last
        if case.has("change:frozen_half"):
            self.first.bias.requires_grad_(False)
        self.later = nn.Parameter(torch.randn(WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.first(rows)
        for part in self.body:
            found = torch.tanh(found) + part(found)
        return found * (1 + self.later / 10)


@dataclass
class RandomLoop:
    """A loop in its own world of random numbers. state: what is saved; objects of it are found in `objects` too."""

    case: RunCase
    numbers: int
    is_wrapped: bool = False
    grown: bool = False
    has_form: bool = False
    step: int = 0
    grows: int | None = None
    world: dict[str, Any] | None = None
    model: Any = None
    plain: Any = None
    objects: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.numbers)
        np.random.seed(self.numbers)
        random.seed(self.numbers)
        self.plain = CaseModules(self.case)
        self.optimizers = self._optimizers()
        # Schedulers of torch do not know groups that come later.
        steady = [one for index, one in enumerate(self.optimizers) if index != self.grows]
        self.schedulers = [
            (SCHEDULERS[name](steady[index % len(steady)]), name)
            for index, name in enumerate(self.case.of("scheduler"))
            if steady
        ]
        self.model = self._wrapped() if self.is_wrapped else self.plain
        self._collect()
        self.world = RngState().state_dict()

    @contextmanager
    def in_its_world(self) -> Iterator[None]:
        """Draw its random numbers, and nobody else's; nothing is compiled."""
        assert self.world is not None
        RngState().load_state_dict(self.world)
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            yield
        self.world = RngState().state_dict()

    # -- what it is made of

    def _optimizers(self) -> list[Any]:
        """Every parameter goes to the first one that takes it; what is left to plain ones."""
        left = [item for item in self.plain.named_parameters() if item[0] != "later"]
        if not self.case.has("change:frozen_half"):  # Else the frozen ones are among them.
            left = [item for item in left if item[1].requires_grad]
        later, made = [("later", self.plain.later)], []
        sparse = {one.weight for one in self.plain.modules() if isinstance(one, nn.Embedding) and one.sparse}
        for name in [*self.case.of("optimizer"), "momentum", "sgd"]:
            kind = OPTIMIZERS[name]
            taken = [item for item in left if (kind.takes_sparse if item[1] in sparse else kind.takes(item[1]))]
            left = [item for item in left if all(item is not other for other in taken)]
            if later and kind.takes(later[0][1]) and not kind.is_whole:
                if not self.case.has("change:grows"):
                    taken, later = taken + later, []
                elif taken:
                    self.grows, later = len(made), []
            if taken:
                made.append(kind.make(self._grouped(taken, is_whole=kind.is_whole)))
        if self.grown:
            self._grow(made)
        return made

    def _grouped(self, items: list[Any], *, is_whole: bool) -> list[Any]:
        items = items[::-1] if self.case.has("change:reversed") else items
        given = items if self.case.has("change:named") else [param for _, param in items]
        if is_whole or not self.case.has("change:groups") or len(items) < 3:
            return given
        first = {"params": given[:1], "name": "first", "depth": (1, None)}
        return [first, {"params": given[1:2]}, {"params": given[2:], "name": "rest", "depth": (2, "x")}]

    def _grow(self, optimizers: list[Any]) -> None:
        later = ("later", self.plain.later) if self.case.has("change:named") else self.plain.later
        if self.grows is not None:
            optimizers[self.grows].add_param_group({"params": [later]})

    def _wrapped(self) -> Any:
        """Wrap some modules, at levels that the case draws."""
        for name in self.case.of("wrapper"):
            if name in WRAPPERS:
                body, draw = self.plain.body, random.Random(name)
                if not body or draw.random() < 0.3:
                    self.plain.first = WRAPPERS[name](self.plain.first)
                else:
                    index = draw.randrange(len(body))
                    body[index] = WRAPPERS[name](body[index])
        whole = [WHOLE_WRAPPERS[name] for name in self.case.of("wrapper") if name in WHOLE_WRAPPERS]
        return whole[0](self.plain) if whole else self.plain

    def _collect(self) -> None:
        case, averages = self.case, torch.optim.swa_utils
        self.objects = {"model": self.model}
        self.objects |= {f"optimizer{index}": one for index, one in enumerate(self.optimizers)}
        self.objects |= {f"scheduler{index}": one for index, (one, _) in enumerate(self.schedulers)}
        # torch scales no complex gradients.
        if case.has("object:scaler") and not any(param.is_complex() for param in self.plain.parameters()):
            self.objects["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        small = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        if case.has("object:average") or case.has("object:ema"):
            self.objects["small"] = small
        if case.has("object:average"):
            self.objects["average"] = averages.AveragedModel(small, use_buffers=True)
        if case.has("object:ema"):
            self.objects["ema"] = averages.AveragedModel(small, multi_avg_fn=averages.get_ema_multi_avg_fn(0.9))
        if case.has("object:second_model"):
            self.objects["second"] = self.model
        if case.has("object:trainer"):
            self.trainer = HoldingTrainer(MODULES["nested"](random.Random(0)))
            self.objects["trainer"] = self.trainer
        if case.has("object:aliased"):
            base = torch.arange(6.0)
            self.objects |= {"base": Held([base, base[1:4]]), "view": Held(base.view(2, 3).t())}
        if case.has("object:history"):
            self.objects["history"] = Held({"losses": [], "last": None, 0: ()})
        for name in case.of("value"):
            # What loads has nothing, or where it has to have the same form, other numbers.
            value = VALUES[name]() if self.numbers == SAVED or self.has_form else None
            self.objects[f"value_{name}"] = Held(value if self.numbers == SAVED else others(value))
        if case.has("object:random"):
            self.generator = torch.Generator().manual_seed(self.numbers)
            named = {"mine": self.generator, "numpy": np.random.default_rng(self.numbers)}
            self.objects["random"] = RngState(generators=named)
        self.small = small
        self.state = dict(self.objects)
        if case.has("change:nested"):
            names = [name for name in self.objects if name != "random"][1:]
            self.state = {name: one for name, one in self.objects.items() if name not in names}
            inner = {name: self.objects[name] for name in names[1:]}
            self.state["nested"] = {"of": [self.objects[name] for name in names[:1]], "all": inner}

    # -- training

    def train(self, steps: int) -> list[torch.Tensor]:
        with self.in_its_world():
            return [self._train_one() for _ in range(steps)]

    def _train_one(self) -> torch.Tensor:
        batch = torch.Generator().manual_seed(self.step)
        rows, wanted = torch.randn(ROWS, WIDTH, generator=batch), torch.randn(ROWS, WIDTH, generator=batch)
        if self.case.has("object:random"):
            rows = rows + torch.randn(ROWS, WIDTH, generator=self.generator) / 10
        scaler = self.objects.get("scaler")

        def closure() -> torch.Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for param in self.plain.parameters():
                param.grad = None
            loss = (self.model(rows) - wanted).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss.detach()

        loss = closure()
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure if scaler is None else lambda: loss)
            elif scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        for scheduler, name in self.schedulers:
            scheduler.step(*((loss,) if name == "plateau" else ()))
        with torch.no_grad():
            self.small[0].weight.copy_(self.plain.later.expand(WIDTH, WIDTH))
        for name in "average", "ema":
            if name in self.objects:
                self.objects[name].update_parameters(self.small)
        if "aliased" in self.case.of("object"):
            self.objects["base"].value[0].add_(1)
        if "history" in self.objects:
            history = self.objects["history"].value
            history["losses"].append({"step": self.step, "loss": float(loss)})
            history |= {"last": (self.step, loss), 0: (*history[0][-2:], str(self.step)), f"at {self.step % 3}": {}}
        if "trainer" in self.objects:
            self.objects["trainer"].train(rows)
        self.step += 1
        if self.step == GROWS_AT and not self.grown:
            self.grown = True
            self._grow(self.optimizers)
        return loss

    def image(self) -> dict[str, Any]:
        """Return all that is to be equal, in a form that compares."""
        with self.in_its_world():
            strip = wrapper_names(self.model)
            found = {name: image(state_dicts(one)) for name, one in self.objects.items() if one is not self.model}
            found["model"] = image({plain_name(name, strip): one for name, one in self.model.state_dict().items()})
            tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
            found["tensors"] = sorted((plain_name(name, strip), image(one)) for name, one in tensors)
            found["random"] = image(self.world)
        return found


SAVED, LOADED = 1, 2


def others(value: Any) -> Any:
    """Return a value of the same form, with other tensors."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_quantized
        return torch.zeros(value.shape, dtype=value.dtype) if is_plain else value
    if type(value) in (list, tuple):
        return type(value)(map(others, value))
    return {key: others(one) for key, one in value.items()} if type(value) is dict else value


def state_dicts(state: Any) -> Any:
    """Return a state as people give it to torch.save: with the state dicts of objects."""
    if callable(getattr(state, "state_dict", None)):
        return state.state_dict()
    if isinstance(state, dict):
        return {name: state_dicts(one) for name, one in state.items()}
    return [state_dicts(one) for one in state] if isinstance(state, list) else state


def give(state: Any, found: Any) -> None:
    """Give what was loaded to the objects of a state, in their order."""
    if callable(getattr(state, "load_state_dict", None)):
        state.load_state_dict(found)
    else:
        for name in state if isinstance(state, dict) else range(len(state)):
            give(state[name], found[name])


def wrapper_names(model: nn.Module) -> list[str]:
    """Return what wrappers put into the names of a model, the deepest first."""
    modules = [(sure_name(f"{name}."), one) for name, one in model.named_modules()]
    parallel = [f"{name}module" for name, one in modules if isinstance(one, nn.DataParallel)]
    return sorted((name.lstrip(".") for name in parallel), key=len, reverse=True)


def sure_name(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def plain_name(name: str, strip: list[str]) -> str:
    name = sure_name(name)
    for prefix in strip:
        if name.startswith(f"{prefix}."):
            above, _, _ = prefix.rpartition("module")
            name = above + name[len(prefix) + 1 :]
    return name


def image(value: Any) -> Any:
    """Return a value with its types and bits as plain tuples."""
    if nn.parameter.is_lazy(value):
        return "lazy"
    if isinstance(value, torch.Tensor):
        value = value.detach()
        bits = raw_of(value) if value.layout is torch.strided and not value.is_quantized else repr(value)
        return "tensor", str(value.dtype), tuple(value.shape), bits
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return type(value).__name__, tuple((type(key).__name__, repr(key), image(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return type(value).__name__, tuple(map(image, value))
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, tuple(sorted(map(repr, value)))
    if callable(getattr(value, "state_dict", None)):
        return "state", image(value.state_dict())
    return type(value).__name__, repr(value)


def differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """Yield where two images differ."""
    if type(found) is type(wanted) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        for name in wanted:
            yield from differences(found[name], wanted[name], f"{where}.{name}")
    elif type(found) is type(wanted) and isinstance(wanted, (tuple, list)) and len(found) == len(wanted):
        named = len(wanted) == 3 and isinstance(wanted[1], str)
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            yield from differences(one, other, f"{where}.{wanted[1] if named else index}")
    elif found != wanted:
        yield f"{where}: {str(found)[:90]} for {str(wanted)[:90]}"
