"""What trainers resume means what torch means: versions of modules, compiled models, states of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

from asyncckpt.integrations import accelerate, lightning, transformers
from tests.integrations import lightning_job
from tests.integrations.lightning_job import pl
from tests.integrations.same import same

STEPS = 4
DATA = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))


class Versioned(torch.nn.Linear):
    """Notes of which version the state is that it is given."""

    _version = 3
    loaded: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *more)


class TrainedNet(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Sequential(Versioned(4, 8, dtype=dtype), torch.nn.ReLU())
        self.last = torch.nn.Linear(8, 1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.to(self.last.weight.dtype)
        return {"loss": (self.last(self.inner(x)) - x.sum(1, keepdim=True)).square().mean()}


class Wide(torch.optim.Optimizer):
    """Has a state that is wider than what it trains."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weights in self.param_groups[0]["params"]:
            mean = self.state[weights].setdefault("mean", torch.zeros_like(weights, dtype=torch.float32))
            mean.mul_(0.9).add_(weights.grad.float())
            weights.copy_(weights.float() - 1e-2 * mean)
        return loss


def by_transformers(folder: Path, net: Any, optimizer: Any, steps: int) -> None:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=8, use_cpu=True, report_to=[],
        disable_tqdm=True, lr_scheduler_type="constant", remove_unused_columns=False,
    )  # fmt: skip
    rows = [{"x": row} for row in DATA]
    running = transformers.Trainer(model=net, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    running.train(resume_from_checkpoint=running.has_checkpoint())


class Module(pl.LightningModule):
    def __init__(self, net: Any, optimizer: Any) -> None:
        super().__init__()
        self.net, self._made = net, optimizer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch)["loss"]

    def configure_optimizers(self) -> Any:
        return self._made


def by_lightning(folder: Path, net: Any, optimizer: Any, steps: int) -> None:
    saving = lightning.AsyncCheckpoint(folder, every_n_train_steps=2)
    running = lightning_job.trainer(folder, saving, max_steps=steps, max_epochs=None)
    loader = torch.utils.data.DataLoader(DATA, batch_size=8, sampler=lightning_job.ResumableSampler(DATA, seed=7))
    running.fit(Module(net, optimizer), lightning.Batches(loader), ckpt_path="last")


def by_accelerate(folder: Path, net: Any, optimizer: Any, steps: int) -> None:
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(net, optimizer)
    with accelerate.checkpointer(accelerator, folder, every=2) as ckpt:
        for step in range(ckpt.restore(), steps):
            prepared(DATA[8 * step : 8 * step + 8])["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)


DOORS: list[Callable[..., None]] = [by_transformers, by_lightning, by_accelerate]
door = pytest.mark.parametrize("train", DOORS, ids=lambda train: train.__name__)


@door
def test_modules_are_given_the_version_of_what_was_saved(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (3, 4):
        monkeypatch.setattr(Versioned, "_version", version)
        net = TrainedNet()
        train(tmp_path, net, torch.optim.Adam(net.parameters()), version - 1)
    assert net.inner[0].loaded == 3


def compiled(net: Any) -> Any:
    return torch.compile(net, backend="eager")


def compiled_within(net: Any) -> Any:
    net.inner = torch.compile(net.inner, backend="eager")
    return net


@door
@pytest.mark.parametrize("wrap", [compiled, compiled_within])
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_compiled_model_goes_on_as_one_that_is_not(train: Any, wrap: Any, is_first: bool, tmp_path: Path) -> None:
    whole = TrainedNet()
    train(tmp_path / "whole", whole, torch.optim.Adam(whole.parameters()), STEPS)
    for steps in (2, STEPS):
        net = TrainedNet()
        optimizer = torch.optim.Adam(net.parameters())
        wrapped = wrap(net) if is_first == (steps == 2) else net
        if train is by_lightning and steps == STEPS:  # As from its own checkpoints: it loads models itself.
            with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
                train(tmp_path / "parts", wrapped, optimizer, steps)
            return
        train(tmp_path / "parts", wrapped, optimizer, steps)
    trained = {name.replace("_orig_mod.", ""): tensor for name, tensor in net.state_dict().items()}
    assert same(trained, dict(whole.state_dict()))


@door
def test_an_optimizers_states_keep_the_dtype_that_was_saved(train: Any, tmp_path: Path) -> None:
    whole = TrainedNet(torch.bfloat16)
    train(tmp_path / "whole", whole, Wide(whole.parameters()), STEPS)
    for steps in (2, STEPS):
        net = TrainedNet(torch.bfloat16)
        optimizer = Wide(net.parameters())
        train(tmp_path / "parts", net, optimizer, steps)
    found = {state["mean"].dtype for state in optimizer.state.values()}
    if train is by_lightning:  # It loads optimizers itself, so torch casts their states as from its own checkpoints.
        assert found == {torch.bfloat16}
        return
    assert found == {torch.float32}
    assert same(dict(net.state_dict()), dict(whole.state_dict()))
