"""Directories of other libraries, and with other things, at the doors of ours: they are named, and never begun anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import asyncckpt
from asyncckpt.cli import run
from asyncckpt.errors import NotFoundError
from asyncckpt.formats import recis

MODEL = torch.nn.Linear(4, 3)


def of_recis(folder: Path) -> None:
    table = asyncckpt.HashTable("user", 4)
    table.insert(torch.arange(9), torch.ones(9, 4))
    folder.rmdir()
    recis.save(folder, hashtables={"user": table})
    torch.save(MODEL.state_dict(), folder / "model.pt")


def of_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": MODEL.state_dict()}, checkpoint_id=folder, no_dist=True)


def of_megatron(folder: Path) -> None:
    (folder / "iter_0000100").mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("100")


def of_hugging_face(folder: Path) -> None:
    (folder / "checkpoint-500").mkdir()
    save_file(MODEL.state_dict(), folder / "checkpoint-500" / "model.safetensors")
    (folder / "checkpoint-x").touch()


def of_torch(folder: Path) -> None:
    torch.save(MODEL.state_dict(), folder / "model.pt")


def of_recsdk(folder: Path) -> None:
    (folder / "20240101120000" / "user" / "rank0" / "key").mkdir(parents=True)


OTHERS = {
    "asyncckpt import recis {}": of_recis,
    "asyncckpt import dcp {}": of_dcp,
    "Megatron's own strategies": of_megatron,
    "asyncckpt import hf {}/checkpoint-500": of_hugging_face,
    "asyncckpt import torch {}/model.pt": of_torch,
    "asyncckpt import recsdk {}": of_recsdk,
}


@pytest.mark.parametrize(("command", "write"), OTHERS.items(), ids=[write.__name__ for write in OTHERS.values()])
def test_what_another_library_saved_is_named_with_what_takes_it_over(
    tmp_path: Path, command: str, write: Callable[[Path], None]
) -> None:
    folder = tmp_path / "ckpt_1000"
    folder.mkdir()
    write(folder)
    said = command.format(folder)
    doors: tuple[Callable[[], object], ...] = (
        lambda: asyncckpt.Loader(folder, tensors={"model": MODEL}).load(),
        lambda: asyncckpt.load(folder),
        lambda: asyncckpt.list_steps(folder),
    )
    for door in doors:
        with pytest.raises(NotFoundError) as caught:
            door()
        assert said in str(caught.value)
    with asyncckpt.Checkpointer(folder, every=1, model=torch.nn.Linear(4, 3)) as checkpointer:
        with pytest.raises(NotFoundError, match="no checkpoint of asyncckpt") as caught:
            checkpointer.restore()
        assert said in str(caught.value)
    with pytest.raises(NotFoundError) as caught:  # Folders of ours are there now.
        asyncckpt.load(folder)
    assert said in str(caught.value)


def test_what_stands_beside_checkpoints_everywhere_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("lost+found", "runs", ".git"):
        (tmp_path / name).mkdir()
    for name in ("train.log", ".gitkeep", "events.out.tfevents.17.host", "config.json", "hparams.yaml"):
        (tmp_path / name).touch()
    with (
        warnings.catch_warnings(),
        asyncckpt.Checkpointer(tmp_path, every=1, model=torch.nn.Linear(4, 3)) as checkpointer,
    ):
        warnings.simplefilter("error")
        assert checkpointer.restore() == 0


def test_what_else_is_there_is_named_where_training_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "weights.xyz").touch()
    with (
        asyncckpt.Checkpointer(tmp_path, every=1, model=torch.nn.Linear(4, 3)) as checkpointer,
        pytest.warns(UserWarning, match=r"no checkpoint in .* to restore.*'weights.xyz'"),
    ):
        assert checkpointer.restore() == 0


def restored(folder: Path, *files: str) -> str:
    """Return what a Checkpointer says of a directory with these files, as an error or as warnings."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    with (
        warnings.catch_warnings(record=True) as caught,
        asyncckpt.Checkpointer(folder, every=1, model=MODEL) as checkpointer,
    ):
        warnings.simplefilter("always")
        try:
            assert checkpointer.restore() == 0
        except NotFoundError as error:
            return f"refused: {error}"
        return "".join(f"warned: {one.message}" for one in caught)


STEP = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")


@pytest.mark.parametrize(
    ("files", "command"),
    [
        (["model_epoch_9.pt", "model_epoch_10.pt", "model_epoch_100.pt"], "torch {}/model_epoch_100.pt"),
        (["epoch=1-step=20.ckpt", "epoch=0-step=99.ckpt"], "torch {}/epoch=1-step=20.ckpt"),
        (["checkpoint.pth.tar", "args.pt"], "torch {}/checkpoint.pth.tar"),
        ([f"checkpoint-500/{name}" for name in ("weights.pt", *STEP)], "torch {}/checkpoint-500/weights.pt"),
        (
            [f"checkpoint-500/{name}" for name in ("adapter_model.safetensors", *STEP)],
            "hf {}/checkpoint-500/adapter_model.safetensors",
        ),
    ],
)
def test_of_several_files_the_newest_that_holds_the_model_is_the_one_to_import(
    tmp_path: Path, files: list[str], command: str
) -> None:
    said = restored(tmp_path, *files)
    assert said.startswith("refused")
    assert f"`asyncckpt import {command.format(tmp_path)} NEW_DIRECTORY`" in said
    assert "begin_anew()" in said


@pytest.mark.parametrize(
    "files",
    [
        ["best.ckpt", "last.ckpt"],
        ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
        ["global_step100/mp_rank_00_model_states.pt", "global_step100/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        ["a.pt", "b.pt", "c.pt", "d.pt"],
    ],
)
def test_where_none_stands_out_the_files_are_listed_without_a_command(tmp_path: Path, files: list[str]) -> None:
    said = restored(tmp_path, *files)
    assert said.startswith("refused")
    assert repr(files[0].rpartition("/")[2]) in said
    assert "asyncckpt import" not in said


@pytest.mark.parametrize("file", ["args.pt", "vocab.pt", "model_args.pt", "mean.safetensors"])
def test_a_file_that_looks_like_no_checkpoint_does_not_stop_a_first_start(tmp_path: Path, file: str) -> None:
    said = restored(tmp_path, file)
    assert said.startswith("warned")
    assert repr(file) in said


@pytest.mark.parametrize(
    "file",
    [
        "lightning_logs/version_0/checkpoints/epoch=1-step=20.ckpt",
        "version_0/checkpoints/epoch=1-step=20.ckpt",
        "checkpoints/epoch=1-step=20.ckpt",
        "runs/exp1/model.pt",
        "logs/model.pt",
        "latest/.metadata",
    ],
)
def test_a_checkpoint_further_down_is_named_where_training_begins_anew(tmp_path: Path, file: str) -> None:
    """Of another run perhaps, so it stops nobody."""
    said = restored(tmp_path, file)
    assert said.startswith("warned")
    assert "training starts from step 0" in said
    assert str((tmp_path / file).parent) in said
    assert "asyncckpt import" in said


def test_an_import_from_recis_names_the_files_that_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ckpt_1000"
    folder.mkdir()
    of_recis(folder)
    with pytest.warns(RuntimeWarning, match=r"left out: \['model.pt'\]"):
        recis.import_checkpoint(folder, tmp_path / "one")
    assert run(["import", "recis", str(folder), str(tmp_path / "two")]) == 0
    assert "left out: 1 file: model.pt" in capsys.readouterr().out
