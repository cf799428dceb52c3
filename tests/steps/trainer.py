"""What a random training does between, in and behind steps, and tells the model of it."""

from __future__ import annotations

import copy
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from tests.steps.gate import StepGate
from tests.steps.model import InterruptedStep, Optimizer, SavesOfTraining, written_by
from tests.steps.trainings import Averaging, RandomTraining, local, parameters_of

ACTIONS_COUNT = 20
SAVES_MAX = 8
SIGNAL = getattr(signal, "SIGUSR1", None)


class SavingTrainer(SavesOfTraining):
    """A training with one Saver or two. gates: hold the background.

    when_waiting: is called when a step waits, or, is_early, between its copies.
    """

    def __init__(self, training: RandomTraining, path: Path, gates: list[StepGate], counts: Counter[str]) -> None:
        super().__init__(training, counts)
        self.path, self.gates, self.random = path, gates, training.random
        self.strays: list[torch.Tensor] = []
        self.when_waiting: Callable[[], None] | None = None
        self.is_early = False
        self._handling: Callable[[], None] = self._save_in_handler
        self.log: list[str] = []
        for optimizer in training.optimizers:
            if self.random.random() < 0.85:
                self.step(optimizer)
        self.savers: list[tuple[asyncckpt.Saver, dict[str, Any], list[Optimizer]]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have one Saver or two, each with optimizers of its own choice, and a handler that saves."""
        with ExitStack() as stack:
            for number in range(1 + (self.random.random() < 0.3)):
                state, optimizers = self.training.state(), self.training.optimizers
                listed = [item for item in optimizers if self.random.random() < 0.8] or optimizers[:1]
                device = asyncckpt.DeviceOptions(optimizers=listed)
                saver = asyncckpt.Saver(
                    path=self.path / str(number), tensors=state, device=device, on_busy="queue", durability="none"
                )
                stack.callback(self._close, saver)
                self.savers.append((saver, state, listed))
            if SIGNAL is not None:
                stack.callback(signal.signal, SIGNAL, signal.signal(SIGNAL, self._handle))
            stack.callback(self.open_gates)
            yield

    def _close(self, saver: asyncckpt.Saver) -> None:
        try:
            saver.close()
        except asyncckpt.UsageError as error:
            self.raised.append(error)

    def open_gates(self) -> None:
        for gate in self.gates:
            gate.open()

    def run(self) -> None:
        actions = [self.train, self.save, self.hold, self.open_gates, self.forward, self.wait_staged]
        actions += [self.train_with_closure, self.load_optimizer, self.load_module, self.write]
        actions += [self.write, self.cancel, self.train_and_fail]
        if SIGNAL is not None:
            actions += [self.train_and_signal, self.train_and_interrupt, self.forward_and_signal]
        if not self.training.is_sharded:
            actions += [self.swap]
        if self.training.mesh is None:
            actions += [self.exchange, self.exchange, self.add_group, self.replace, self.train_a_stranger]
        # Some programs do hardly anything else than two or three of these.
        weights = [2, 3, 1, *(self.random.choice([0, 0.3, 0.3, 0.3, 2]) for _ in actions[3:])]
        for _ in range(ACTIONS_COUNT):
            (action,) = self.random.choices(actions, weights)
            self.log.append(action.__name__)
            self.counts[action.__name__] += self.is_open
            action()
        self.open_gates()

    def save(self) -> None:
        if len(self.saves) >= SAVES_MAX:
            return
        gate = self.random.choice([*self.gates, None, None])
        if sum(not save.future.done() for save in self.saves) >= 2:
            self.open_gates()  # There are two arenas.
        elif gate is not None:
            gate.shut()
        saver, state, listed = self.random.choice(self.savers)
        state["done"]["count"] += 1
        self.call(saver, state, listed)

    def cancel(self) -> None:
        if self.saves:
            save = self.random.choice(self.saves[-2:])
            save.is_cancelled |= save.future.cancel()

    def _send(self, handle: Callable[[], None]) -> None:
        """Let a signal come, which is handled so."""
        assert SIGNAL is not None
        self._handling = handle
        signal.raise_signal(SIGNAL)

    def _handle(self, *_: object) -> None:
        self._handling()

    def _save_in_handler(self) -> None:
        self.save()
        self.open_gates()

    def _interrupt(self) -> None:
        self.open_gates()
        raise InterruptedStep

    def waits(self, *, is_copying: bool) -> None:
        """Do what is to be done while a step waits, or between two of its copies."""
        if not self.steps_count or (is_copying and not self.is_early):
            return
        act, self.when_waiting = self.when_waiting or self.open_gates, None
        act()

    def step(self, optimizer: Optimizer, within: Callable[[], object] | None = None) -> None:
        """Step. within: is called by its closure, once."""
        self.training.train_forward(optimizer)
        has_closure = within is not None or isinstance(optimizer, torch.optim.LBFGS) or self.random.random() < 0.1
        acts = [within]

        def closure() -> torch.Tensor:
            act = acts.pop() if acts else None
            if act is not None:
                act()
            self.training.set_gradients(optimizer)
            return torch.tensor(self.random.random())

        with self.stepping(optimizer):
            optimizer.step(closure) if has_closure else optimizer.step()  # type: ignore[arg-type]

    def train(self) -> None:
        self.step(self.random.choice(self.training.optimizers))

    def train_with_closure(self) -> None:
        self.step(self.random.choice(self.training.optimizers), self.random.choice([self.save, self.save, self.train]))

    def train_and_signal(self) -> None:
        """Let a signal come while a step waits."""
        optimizer, send = self.random.choice(self.training.optimizers), partial(self._send, self._save_in_handler)
        if isinstance(optimizer, Averaging):
            optimizer.between = send
        else:
            self.when_waiting, self.is_early = send, self.random.random() < 0.3
        self.step(optimizer)
        self.when_waiting, self.is_early = None, False
        vars(optimizer).pop("between", None)

    def train_and_interrupt(self) -> None:
        """Let a signal end a step while it waits, before it writes anything."""
        self.when_waiting, self.is_early = partial(self._send, self._interrupt), self.random.random() < 0.3
        with suppress(InterruptedStep):
            self.train()
        self.when_waiting, self.is_early = None, False

    def train_and_fail(self) -> None:
        """Step with a closure that raises, and again: until then, saves copy in their call."""
        optimizer = self.random.choice(self.training.optimizers)
        with suppress(ZeroDivisionError):
            self.step(optimizer, lambda: 1 // 0)
        self.random.choice([self.save, self.write, self.forward])()
        self.step(optimizer)

    def train_a_stranger(self) -> None:
        """Step an optimizer of pieces of a parameter, that no Saver was told of."""
        parameter = self.random.choice(list(self.training.module.parameters()))
        if parameter.numel() > 1:
            begin = self.random.randrange(parameter.numel())
            piece = parameter.detach()[begin : begin + 90]
            if self.random.random() < 0.5:
                piece = parameter.data[begin:][::2]
            self.step(torch.optim.SGD([torch.nn.Parameter(piece)], lr=0.1, fused=self.random.random() < 0.5))

    def forward(self) -> None:
        self._forward(lambda: None)

    def forward_and_signal(self) -> None:
        self._forward(partial(self._send, self._save_in_handler))

    def _forward(self, between: Callable[[], None]) -> None:
        self.training.module.statistics.add_(1)  # type: ignore[operator]
        if self.training.is_sharded:
            self._forward_of_all(between)
        else:
            between()
        for _, state, _ in self.savers:
            state["done"]["seen"].add_(1)
        if self.random.random() < 0.1:
            self.training.flat[-20:].add_(1)
            self.note_shared()

    def _forward_of_all(self, between: Callable[[], None]) -> None:
        """Between two layers: within one, what FSDP2 has gathered for it is given back by any state_dict()."""
        layer: Any = next(self.training.module.children())
        handle = layer.register_forward_hook(lambda *_: between())
        self.training.module(torch.ones(2, 40))
        handle.remove()

    def hold(self) -> None:
        self.random.choice(self.gates).shut()

    def wait_staged(self) -> None:
        self.open_gates()
        for save in self.saves:
            save.future.wait_staged(30)
            save.watched.clear()

    def load_optimizer(self) -> None:
        optimizer = self.random.choice(self.training.optimizers)
        content = copy.deepcopy(optimizer.state_dict())
        for own in content["state"].values():
            for value in own.values():
                if isinstance(value, torch.Tensor):
                    value.mul_(0.5)
        optimizer.load_state_dict(content)

    def load_module(self) -> None:
        if self.random.random() < 0.7:
            self.wait_staged()
        module = self.training.module
        content = {name: value.detach().clone() * 0.5 for name, value in module.state_dict().items()}
        swaps = self.training.mesh is None and self.random.random() < 0.3
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        try:
            with self.writing(*module.parameters()):
                module.load_state_dict(content)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def write(self) -> None:
        """Write to a tensor otherwise than by a step."""
        written = [tensor for item in self.training.optimizers for tensor in written_by(item) if tensor.numel()]
        written += [item for item in self.strays if item.numel()]
        if self.random.random() < 0.4:
            written = [item for item in written if id(item) in self.exchanged] or written
        if not written:
            return
        tensor = self.random.choice(written)
        ways: list[Callable[[], object]] = [lambda: tensor.add_(3), lambda: tensor.detach().add_(3)]
        if self.training.mesh is None:
            ways += [lambda: torch._foreach_add_([tensor], 3.0)]
        else:
            ways += [lambda: local(tensor).add_(3)]
        with self.writing(tensor), torch.no_grad():
            self.random.choice(ways)()

    def _two_alike(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
        """Return parameters of two optimizers, of one form."""
        owned = [(item, number) for number, one in enumerate(self.training.optimizers) for item in parameters_of(one)]
        one, owner = self.random.choice(owned)
        alike = [
            item for item, number in owned if number != owner and item is not one and form_of(item) == form_of(one)
        ]
        return (one, self.random.choice(alike)) if alike else None

    def exchange(self) -> None:
        found = self._two_alike()
        if found is not None:
            one, other = found
            one.data, other.data = other.data, one.data
            self.exchanged |= {id(one), id(other)}
            self.counts["memory exchanged"] += self.is_open

    def swap(self) -> None:
        found = self._two_alike() if self.random.random() < 0.5 else None
        if found is None:
            parameter = self.random.choice(parameters_of(self.random.choice(self.training.optimizers)))
            other = torch.nn.Parameter(torch.empty_like(parameter).zero_())
            with torch.no_grad():
                while other._version < parameter._version:
                    other.add_(1)
            found = parameter, other
            self.strays.append(other)
        for item in found:
            item.grad = None
        if id(found[0]) in self.exchanged or id(found[1]) in self.exchanged:
            self.exchanged |= {id(found[0]), id(found[1])}
        torch.utils.swap_tensors(*found)  # type: ignore[no-untyped-call]

    def add_group(self) -> None:
        optimizer = self.random.choice(self.training.optimizers)
        if not isinstance(optimizer, torch.optim.LBFGS):
            added = self.training.parameter()
            optimizer.add_param_group({"params": [added]})
            if self.random.random() < 0.7:
                self.training.module.register_parameter(f"added{self.training.number}", added)

    def replace(self) -> None:
        """Let a new parameter come for one, in the module and in its optimizer."""
        optimizer = self.random.choice(self.training.optimizers)
        group = self.random.choice(optimizer.param_groups)
        if isinstance(optimizer, torch.optim.LBFGS) or not group["params"]:
            return
        number = self.random.randrange(len(group["params"]))
        old = group["params"][number]
        group["params"][number] = new = torch.nn.Parameter(old.detach().clone())
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
        for name, value in list(self.training.module.named_parameters()):
            if value is old:
                self.training.module.register_parameter(name, new)
        self.strays.append(old)


def form_of(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.dtype, local(tensor).stride(), str(getattr(tensor, "placements", None))
