"""Lightning's own Trainer and Fabric with ours: resumed runs are bit-equal, and ModelCheckpoint's paths are durable."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpoint, AsyncCheckpointIO, checkpoint_file
from tests.integrations.jobs import differences, run_job
from tests.integrations.lightning_job import STEPS, TwoLayers, batches, held_out, trainer
from tests.worlds.gates import Gate

KILLED = -signal.SIGKILL
ENDED = (0, 1, 143, -signal.SIGTERM)  # Lightning says how its process ends behind SIGTERM.


@pytest.mark.parametrize("variable", ["", "MONITOR", "MODEL_CHECKPOINT"])
def test_a_run_killed_and_terminated_ends_like_an_undisturbed_one(tmp_path: Path, variable: str) -> None:
    environment = {variable: "1"} if variable else {}
    whole, _ = run_job("lightning_job", tmp_path / "whole", environment=environment)
    parts = []
    for name, step in [("SIGKILL", 7), ("SIGTERM", 10), ("SIGKILL", 17)]:
        expected = ENDED if name == "SIGTERM" else [KILLED]
        part, _ = run_job("lightning_job", tmp_path / "parts", name, step, expected=expected, environment=environment)
        parts.append(part)
        assert max(at for _, at in part) == step
        if name == "SIGTERM":
            shutil.copytree(tmp_path / "parts", tmp_path / "planted")
    if variable == "":
        assert 10 in asyncckpt.list_steps(tmp_path / "parts")
        wrong, _ = run_job("lightning_job", tmp_path / "planted", environment={"PLANT": "random numbers"})
        assert any(whole[key] != values for key, values in wrong.items())
    last, printed = run_job("lightning_job", tmp_path / "parts", environment=environment)
    assert f"ended at {STEPS}" in printed
    assert min(step for _, step in last) > 1
    # Behind a SIGTERM at the end of an epoch, the validation that was due comes first.
    assert differences(whole, *parts, last) == {}


def test_the_best_step_is_kept_tested_and_resumed_from(tmp_path: Path) -> None:
    saved = AsyncCheckpoint(tmp_path, monitor="val_loss", keep=1)
    running = trainer(tmp_path, saved, max_epochs=4)
    running.fit(TwoLayers(), batches(), held_out())
    assert saved.best_step in asyncckpt.list_steps(tmp_path)
    assert len(asyncckpt.list_steps(tmp_path)) <= 2
    other = TwoLayers()
    [tested] = running.validate(other, held_out(), ckpt_path="best", verbose=False)
    assert tested["val_loss"] == saved.best_model_score
    best = asyncckpt.load(tmp_path, saved.best_step)["checkpoint"]["state_dict"]
    assert all(torch.equal(best[name], tensor) for name, tensor in other.state_dict().items())


class _NotYetANumber(TwoLayers):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.current_epoch == 0:
            self.log("val_loss", torch.tensor(torch.nan))
        else:
            super().validation_step(batch, batch_idx)


def test_a_metric_that_is_not_yet_a_number_is_never_the_best(tmp_path: Path) -> None:
    saved = AsyncCheckpoint(tmp_path, monitor="val_loss", keep=1)
    trainer(tmp_path, saved, max_epochs=3).fit(_NotYetANumber(), batches(), held_out())
    assert saved.best_step in (20, 30)
    assert saved.best_model_score is not None
    assert saved.best_model_score < float("inf")
    assert saved.best_step in asyncckpt.list_steps(tmp_path)


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_what_ends_an_epoch_by_a_metric_goes_on_behind_a_validation(tmp_path: Path, monitor: str | None) -> None:
    """The newest step was saved behind the validation of an epoch, and before what ends the epoch."""

    def fit(folder: Path, epochs: int) -> list[Any]:
        stopping = pl.callbacks.EarlyStopping("val_loss", patience=2, min_delta=10.0)
        saved = AsyncCheckpoint(folder, every_n_train_steps=10, monitor=monitor)
        running = trainer(folder, saved, stopping, max_epochs=epochs)
        running.fit(TwoLayers(), batches(), held_out(), ckpt_path="last")
        return [running.global_step, stopping.wait_count, stopping.stopped_epoch, float(stopping.best_score)]

    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "parts", 1)
    assert asyncckpt.list_steps(tmp_path / "parts")[-1] == 10
    assert fit(tmp_path / "parts", 4) == whole
    assert whole[0] == 30


class _OnPlateau(TwoLayers):
    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, threshold=1.0)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def test_a_rate_that_follows_a_metric_is_lowered_behind_a_resume_too(tmp_path: Path) -> None:
    def fit(folder: Path, epochs: int) -> list[Any]:
        running = trainer(folder, AsyncCheckpoint(folder, every_n_train_steps=10), max_epochs=epochs)
        running.fit(_OnPlateau(), batches(), held_out(), ckpt_path="last")
        adam, scheduler = running.optimizers[0], running.lr_scheduler_configs[0].scheduler
        return [running.global_step, adam.param_groups[0]["lr"], scheduler.last_epoch, scheduler.num_bad_epochs]

    whole = fit(tmp_path / "whole", 3)
    fit(tmp_path / "parts", 1)
    fit(tmp_path / "parts", 2)
    assert fit(tmp_path / "parts", 3) == whole
    assert whole[1] < 1e-2


def test_the_newest_of_two_callbacks_is_the_last(tmp_path: Path) -> None:
    def fit(epochs: int) -> int:
        own = pl.callbacks.ModelCheckpoint(tmp_path / "own", every_n_epochs=2, save_last=True)
        running = trainer(tmp_path, AsyncCheckpoint(tmp_path / "ours", every_n_train_steps=5), own, max_epochs=epochs)
        running.fit(TwoLayers(), batches(), held_out(), ckpt_path="last")
        return running.fit_loop.epoch_loop._batches_that_stepped

    fit(3)  # ModelCheckpoint's last one is that of step 20.
    assert asyncckpt.list_steps(tmp_path / "ours")[-1] == 30
    assert fit(4) == 40


class _Named(TwoLayers):
    """Keeps its arguments in the checkpoint, and says what it is tested with."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("tested", self.net(batch).mean())


def _tested(running: pl.Trainer, path: object) -> float:
    [found] = running.test(_Named(), held_out(), ckpt_path=path, verbose=False)
    return float(found["tested"])


def test_lightnings_switches_take_a_step_the_newest_and_the_best(tmp_path: Path) -> None:
    saved = AsyncCheckpoint(tmp_path / "run", every_n_train_steps=5, monitor="val_loss")
    running = trainer(tmp_path, saved)
    running.fit(_Named(), batches(), held_out())
    assert saved.best_step is not None
    newest, tenth = _tested(running, tmp_path / "run"), _tested(running, tmp_path / "run" / "step=10")
    assert newest != tenth
    assert _tested(running, "last") == newest
    assert _tested(running, "best") == _tested(running, saved.best_model_path)
    other = AsyncCheckpoint(tmp_path / "other", every_n_train_steps=5)
    trainer(tmp_path, other).fit(_Named(), batches(), held_out(), ckpt_path=tmp_path / "run" / "step=10")
    assert asyncckpt.list_steps(tmp_path / "other") == [15, 20]


def test_a_fit_behind_an_older_step_of_its_directory_is_refused_before_it_trains(tmp_path: Path) -> None:
    arguments = {"model": _Named(), "train_dataloaders": batches(), "ckpt_path": tmp_path / "run" / "step=10"}
    saved = AsyncCheckpoint(tmp_path / "run", every_n_train_steps=5)
    trainer(tmp_path, saved).fit(_Named(), batches())
    running = trainer(tmp_path, AsyncCheckpoint(tmp_path / "run", every_n_train_steps=5))
    with pytest.raises(asyncckpt.UsageError, match=r"newer steps than step 10.*found step 20 .*remove_after"):
        running.fit(**arguments)
    assert (running.global_step, asyncckpt.list_steps(tmp_path / "run")) == (10, [5, 10, 15, 20])
    asyncckpt.checkpoints.remove_after(tmp_path / "run", 10)
    trainer(tmp_path, AsyncCheckpoint(tmp_path / "run", every_n_train_steps=4)).fit(**arguments)
    assert asyncckpt.list_steps(tmp_path / "run") == [5, 10, 12, 16, 20]


def test_paths_of_model_checkpoint_are_tested_and_resumed_with_the_plugin_alone(tmp_path: Path) -> None:
    own = pl.callbacks.ModelCheckpoint(tmp_path / "run", monitor="val_loss", save_last=True)
    running = trainer(tmp_path, own, plugins=[AsyncCheckpointIO()])
    running.fit(_Named(), batches(), held_out())
    assert _tested(running, "best") == _tested(running, own.best_model_path)
    assert _tested(running, "last") == _tested(running, tmp_path / "run" / "last.ckpt")
    more = trainer(tmp_path, plugins=[AsyncCheckpointIO()], max_epochs=3)
    more.fit(_Named(), batches(), held_out(), ckpt_path=own.best_model_path)
    assert more.global_step == 30
    with pytest.raises(IsADirectoryError):  # Lightning's own plugin reads files.
        _tested(trainer(tmp_path), own.best_model_path)


def test_load_from_checkpoint_takes_a_file_of_a_checkpoint(tmp_path: Path) -> None:
    saved = AsyncCheckpoint(tmp_path / "run", every_n_train_steps=5)
    own = pl.callbacks.ModelCheckpoint(tmp_path / "own")
    running = trainer(tmp_path, saved, own)
    running.fit(_Named(width=7), batches())
    newest = asyncckpt.load(tmp_path / "run")["checkpoint"]["state_dict"]
    for path in (tmp_path / "run", tmp_path / "run" / "step=20", own.best_model_path):
        found = _Named.load_from_checkpoint(checkpoint_file(path))
        assert found.hparams["width"] == 7
        assert all(torch.equal(newest[name], tensor) for name, tensor in found.state_dict().items())
        with pytest.raises(OSError, match="directory"):  # It opens its path itself: no plugin is asked.
            _Named.load_from_checkpoint(path)
    tenth = _Named.load_from_checkpoint(checkpoint_file(tmp_path / "run" / "step=10"), width=9)
    assert tenth.hparams["width"] == 9
    assert not torch.equal(tenth.net[0].weight, newest["net.0.weight"])


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.UsageError, match="no metric 'val_los'"):
        trainer(tmp_path, AsyncCheckpoint(tmp_path, monitor="val_los")).fit(TwoLayers(), batches(), held_out())
    with pytest.raises(asyncckpt.UsageError, match="nothing says when to save"):
        AsyncCheckpoint(tmp_path)


def test_accumulated_gradients_count_optimizer_steps(tmp_path: Path) -> None:
    saved = AsyncCheckpoint(tmp_path, every_n_train_steps=2)
    trainer(tmp_path, saved, accumulate_grad_batches=2).fit(TwoLayers(), batches())
    assert asyncckpt.list_steps(tmp_path) == [2, 4, 6, 8, 10]


def test_nothing_is_removed_before_what_replaces_it_is_durable(tmp_path: Path) -> None:
    gate, plugin = Gate(), AsyncCheckpointIO()
    plugin.save_checkpoint({"x": torch.ones(3)}, tmp_path / "old.ckpt")
    plugin.teardown()
    slow = AsyncCheckpointIO(filter_func=gate)
    value = {"x": torch.full((3,), 2.0), "epoch": 1}
    slow.save_checkpoint(value, tmp_path / "new.ckpt")
    assert not (tmp_path / "new.ckpt").exists()  # Nothing that looks for a last checkpoint finds a part of one.
    value["x"].zero_()
    slow.remove_checkpoint(tmp_path / "old.ckpt")
    assert asyncckpt.list_steps(tmp_path / "old.ckpt") == [0]
    gate.open()
    slow.teardown()
    assert not (tmp_path / "old.ckpt").exists()
    found = slow.load_checkpoint(tmp_path / "new.ckpt")
    assert (found["x"].tolist(), found["epoch"]) == ([2.0, 2.0, 2.0], 1)


def test_what_a_failed_save_was_to_replace_stays(tmp_path: Path) -> None:
    def failing(blocks: list[Any]) -> list[Any]:
        raise RuntimeError("disk on fire")

    AsyncCheckpointIO().save_checkpoint({"x": torch.ones(3)}, tmp_path / "old.ckpt")
    broken = AsyncCheckpointIO(filter_func=failing)
    broken.save_checkpoint({"x": torch.zeros(3)}, tmp_path / "new.ckpt")
    heard = []
    for call in (lambda: broken.remove_checkpoint(tmp_path / "old.ckpt"), broken.teardown, broken.teardown):
        try:
            call()
        except asyncckpt.CheckpointError as error:  # Whichever is called when the save has failed.
            heard.append(str(error))
    assert len(heard) == 1
    assert "disk on fire" in heard[0]
    assert AsyncCheckpointIO().load_checkpoint(tmp_path / "old.ckpt")["x"].tolist() == [1.0, 1.0, 1.0]


def test_a_path_that_is_saved_again_keeps_its_newest(tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO()
    for value in range(3):
        plugin.save_checkpoint({"value": value, "x": torch.ones(1)}, tmp_path / "last.ckpt")
    assert plugin.load_checkpoint(tmp_path / "last.ckpt")["value"] == 2
    plugin.teardown()
    assert len(asyncckpt.list_steps(tmp_path / "last.ckpt")) == 1


def test_a_link_is_removed_without_what_it_names(tmp_path: Path) -> None:
    gate, plugin = Gate(), AsyncCheckpointIO()
    plugin.save_checkpoint({"x": torch.ones(1)}, tmp_path / "best.ckpt")
    plugin.teardown()
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    plugin.remove_checkpoint(tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    slow = AsyncCheckpointIO(filter_func=gate)
    slow.save_checkpoint({"x": torch.ones(1)}, tmp_path / "other.ckpt")
    slow.remove_checkpoint(tmp_path / "last.ckpt")
    slow.save_checkpoint({"x": torch.zeros(1)}, tmp_path / "last.ckpt")
    gate.open()
    slow.teardown()
    assert not (tmp_path / "last.ckpt").is_symlink()
    found = [plugin.load_checkpoint(tmp_path / f"{name}.ckpt")["x"].item() for name in ("best", "last")]
    assert found == [1.0, 0.0]


def test_a_path_that_was_to_be_removed_and_is_saved_again_stays(tmp_path: Path) -> None:
    gate, plugin = Gate(), AsyncCheckpointIO()
    plugin.save_checkpoint({"value": 1, "x": torch.ones(1)}, tmp_path / "a.ckpt")
    plugin.teardown()
    slow = AsyncCheckpointIO(filter_func=gate)
    slow.save_checkpoint({"value": 2, "x": torch.ones(1)}, tmp_path / "b.ckpt")
    slow.remove_checkpoint(tmp_path / "a.ckpt")
    slow.save_checkpoint({"value": 3, "x": torch.ones(1)}, tmp_path / "a.ckpt")
    gate.open()
    slow.teardown()
    assert slow.load_checkpoint(tmp_path / "a.ckpt")["value"] == 3


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path / "run", tensors={"x": torch.ones(1)}) as saver:
        for step in range(3):
            saver.save(step)
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "notes.txt").write_text("mine")
    plugin = AsyncCheckpointIO()
    for name in ("run", "things"):
        with pytest.raises(asyncckpt.UsageError, match=f"{name}' was not made by AsyncCheckpointIO"):
            plugin.save_checkpoint({"x": torch.ones(1)}, tmp_path / name)
    plugin.teardown()
    assert asyncckpt.list_steps(tmp_path / "run") == [0, 1, 2]
    assert [path.name for path in (tmp_path / "things").iterdir()] == ["notes.txt"]


def test_lightnings_own_files_are_read(tmp_path: Path) -> None:
    running = trainer(tmp_path)
    running.fit(TwoLayers(), batches())
    running.save_checkpoint(tmp_path / "theirs.ckpt")
    resumed = trainer(tmp_path, AsyncCheckpoint(tmp_path / "ours", every_n_train_steps=5), max_epochs=3)
    resumed.fit(TwoLayers(), batches(), ckpt_path=str(tmp_path / "theirs.ckpt"))
    assert asyncckpt.list_steps(tmp_path / "ours") == [25, 30]


def test_a_path_that_is_not_there_is_refused_as_by_lightning(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        AsyncCheckpointIO().load_checkpoint(tmp_path / "nothing")


def test_nothing_is_saved_to_a_url_and_no_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plugin, url = AsyncCheckpointIO(), "s3://bucket/last.ckpt"
    for call in (
        lambda: plugin.save_checkpoint({"x": torch.ones(1)}, url),
        lambda: plugin.remove_checkpoint(url),
        lambda: AsyncCheckpoint(url, every_n_train_steps=1),
    ):
        with pytest.raises(asyncckpt.UsageError, match="is a URL"):
            call()
    plugin.teardown()
    assert list(tmp_path.iterdir()) == []


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO()
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    fabric.launch()
    net = torch.nn.Linear(4, 1)
    model, adam = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    adam.step()
    fabric.save(tmp_path / "step-1", {"model": model, "adam": adam, "step": 1})
    weight = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.zero_()
    rest = fabric.load(tmp_path / "step-1", {"model": model, "adam": adam})
    assert torch.equal(net.weight, weight)
    assert rest == {"step": 1}
    plugin.teardown()
    assert asyncckpt.verify(tmp_path / "step-1")


def test_several_ranks_save_and_resume_together(tmp_path: Path) -> None:
    whole, _ = run_job("lightning_ranks_job", tmp_path / "whole", 4, ranks=2)
    run_job("lightning_ranks_job", tmp_path / "parts", 2, ranks=2)
    rest, printed = run_job("lightning_ranks_job", tmp_path / "parts", 4, ranks=2)
    assert "ended at 20" in printed
    assert {key: values for key, values in rest.items() if whole[key] != values} == {}
    assert asyncckpt.describe(tmp_path / "parts").ranks_count == 2


def test_two_callbacks_save_to_two_directories_and_resume(tmp_path: Path) -> None:
    def callbacks(folder: Path) -> list[AsyncCheckpoint]:
        often = AsyncCheckpoint(folder / "often", every_n_train_steps=2, keep=2)
        return [often, AsyncCheckpoint(folder / "best", monitor="val_loss", keep=1)]

    whole = trainer(tmp_path, *callbacks(tmp_path / "whole"), max_epochs=4)
    first, second = TwoLayers(), TwoLayers()
    whole.fit(first, batches(), held_out())
    of_whole = [one for one in whole.callbacks if isinstance(one, AsyncCheckpoint)]
    trainer(tmp_path, *callbacks(tmp_path / "parts"), max_epochs=2).fit(TwoLayers(), batches(), held_out())
    resumed = trainer(tmp_path, *callbacks(tmp_path / "parts"), max_epochs=4)
    resumed.fit(second, batches(), held_out(), ckpt_path="last")
    assert all(torch.equal(one, second.state_dict()[name]) for name, one in first.state_dict().items())
    of_resumed = [one for one in resumed.callbacks if isinstance(one, AsyncCheckpoint)]
    assert [one.best_step for one in of_whole] == [one.best_step for one in of_resumed]
    assert of_whole[1].best_step is not None
    for name in ("often", "best"):
        steps = [asyncckpt.list_steps(tmp_path / run / name) for run in ("whole", "parts")]
        assert steps[0][-1] == steps[1][-1]  # What a run has resumed from stays, until it has saved often enough.


def test_a_directory_that_was_renamed_and_an_earlier_key_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fitted(name: str, epochs: int) -> AsyncCheckpoint:
        saved = AsyncCheckpoint(tmp_path / name, monitor="val_loss")
        trainer(tmp_path, saved, max_epochs=epochs).fit(TwoLayers(), batches(), held_out(), ckpt_path="last")
        return saved

    expected = fitted("whole", 4).best_model_score
    with monkeypatch.context() as patch:  # As one callback alone was called.
        patch.setattr(AsyncCheckpoint, "state_key", property(lambda self: "AsyncCheckpoint"))
        fitted("earlier", 2)
    fitted("before", 2)
    for name in ("earlier", "before"):
        seen: list[float | None] = []
        with monkeypatch.context() as patch:
            real = AsyncCheckpoint.load_state_dict

            def load(self: AsyncCheckpoint, state: Any, real: Any = real, seen: list[Any] = seen) -> None:
                real(self, state)
                seen.append(self.best_model_score)

            patch.setattr(AsyncCheckpoint, "load_state_dict", load)
            (tmp_path / name).rename(tmp_path / f"{name} moved")
            assert fitted(f"{name} moved", 4).best_model_score == expected
        assert len(seen) == 1
        assert seen[0] is not None


def test_a_trial_of_one_step_saves_nothing(tmp_path: Path) -> None:
    trainer(tmp_path, AsyncCheckpoint(tmp_path / "run", every_n_train_steps=1), fast_dev_run=True).fit(
        TwoLayers(), batches(), held_out()
    )
    assert not (tmp_path / "run").exists()
