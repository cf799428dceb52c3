"""Trainers of other libraries whose disk was lost go on from where they upload to, on a real S3 server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpoint, AsyncCheckpointIO, checkpoint_file
from asyncckpt.integrations.transformers import Trainer
from tests.cloud import seaweed
from tests.integrations import lightning_job


def test_a_trainer_of_transformers_goes_on_from_there(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(x).square().mean()}

    def trained(to: int) -> tuple[bool, torch.Tensor]:
        more = {"save_steps": 2, "max_steps": to, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3}
        arguments = transformers.TrainingArguments(str(tmp_path / "run"), remove_unused_columns=False, **more)
        data = [{"x": torch.full((2,), float(number))} for number in range(99)]
        torch.manual_seed(0)
        trainer = Trainer(Model(), arguments, train_dataset=data, checkpointing={"options": {"upload": url}})
        goes_on = trainer.has_checkpoint()
        trainer.train(resume_from_checkpoint=goes_on)
        return goes_on, trainer.model.inner.weight.detach().clone()

    with pytest.raises(asyncckpt.UsageError, match="checkpoint_dir is a URL"):
        Trainer(Model(), checkpoint_dir=url)
    _, expected = trained(to=6)
    asyncckpt.checkpoints.remove_after(url, 4)
    shutil.rmtree(tmp_path / "run")
    goes_on, found = trained(to=6)
    assert goes_on
    assert found.equal(expected)
    assert (asyncckpt.list_steps(url), asyncckpt.list_steps(tmp_path / "run" / "checkpoints")) == ([2, 4, 6], [6])


def fitted(folder: Path, url: str, *, epochs: int, ckpt_path: str | None = "last") -> lightning_job.TwoLayers:
    options = {"upload": url}
    saved = AsyncCheckpoint(folder, every_n_train_steps=5, monitor="val_loss", checkpointing={"options": options})
    model = lightning_job.TwoLayers()
    running = lightning_job.trainer(folder.parent, saved, max_epochs=epochs)
    running.fit(model, lightning_job.batches(), lightning_job.held_out(), ckpt_path=ckpt_path)
    return model


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


@pytest.mark.parametrize("ckpt_path", ["last", None, "url", "step"])
def test_a_trainer_of_lightning_goes_on_from_there(
    owner: seaweed.Server,
    url: str,
    tmp_path: Path,
    ckpt_path: str | None,
) -> None:
    folder, names = tmp_path / "run", {"url": url, "step": f"{url}/step=10"}
    whole = weights(fitted(tmp_path / "whole", url + "-whole", epochs=2))
    fitted(folder, url, epochs=1)
    assert asyncckpt.list_steps(url) == [5, 10]
    shutil.rmtree(folder)
    found = fitted(folder, url, epochs=2, ckpt_path=names.get(str(ckpt_path), ckpt_path))
    assert weights(found).equal(whole)
    assert (asyncckpt.list_steps(url), asyncckpt.list_steps(folder)) == ([5, 10, 15, 20], [15, 20])


def test_lightning_finds_the_best_step_there(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saved = AsyncCheckpoint(
        folder, every_n_train_steps=5, monitor="val_loss", checkpointing={"options": {"upload": url}}
    )
    running = lightning_job.trainer(tmp_path, saved)
    running.fit(lightning_job.TwoLayers(), lightning_job.batches(), lightning_job.held_out())
    best = asyncckpt.load(url, saved.best_step)["checkpoint"]["state_dict"]
    shutil.rmtree(folder)
    model = lightning_job.TwoLayers()
    running.validate(model, lightning_job.held_out(), ckpt_path="best", verbose=False)
    assert all(torch.equal(best[name], tensor) for name, tensor in model.state_dict().items())
    read = torch.load(checkpoint_file(f"{url}/step={saved.best_step}"))["state_dict"]
    assert all(torch.equal(best[name], tensor) for name, tensor in read.items())


def test_lightning_begins_anew_where_nothing_is(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    fitted(tmp_path / "run", url, epochs=1)
    assert asyncckpt.list_steps(url) == [5, 10]


def test_lightning_says_what_is_not_there(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    fitted(tmp_path / "run", url, epochs=1)
    with pytest.raises(asyncckpt.NotFoundError, match="step 7 is not in"):
        AsyncCheckpointIO().load_checkpoint(f"{url}/step=7")
    with pytest.raises(asyncckpt.UsageError, match="is a URL"):
        AsyncCheckpointIO().save_checkpoint({}, url)
