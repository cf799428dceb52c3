"""Tests of checkpoints of Lightning, of its Fabric and of Hugging Face's Trainer, with their own saving and with ours.

    .venv-integrations/bin/python -m bench.trainer_tests lightning <pytorch-lightning>/tests/tests_pytorch [test ...]
    .venv-integrations/bin/python -m bench.trainer_tests fabric <pytorch-lightning>/tests/tests_fabric [test ...]
    .venv-integrations/bin/python -m bench.trainer_tests transformers <transformers>/tests/trainer [test ...]

For whoever has a checkout; the package that is installed is tested. A test is file, file::test or file::class::test.
Lightning's need cloudpickle, jsonargparse, tensorboard, omegaconf and scikit-learn, those of Hugging Face datasets and
parameterized, and what they ask of the hub fails with both. Prints for each file how many tests pass with the trainer's
own saving, how many of these with ours, and why the others do not. In every process a sitecustomize module puts ours in
their place:

lightning, fabric
               AsyncCheckpointIO where TorchCheckpointIO is made. The tests look at files and threads as soon as
               something was saved, so every save is waited for, and a directory of ours is a file to them.
               `torch.load` and `load_from_checkpoint` read it: people write `checkpoint_file(path)` there.
transformers   our Trainer, with discard_newer=True, since the tests go back to older steps of a folder. They end by
               looking for Hugging Face's files, which are not there; where they resume by a path, it has our step.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.upstream_tests import run_tests, table

THREAD_SECONDS_MAX = 30


@dataclass(frozen=True)
class Suite:
    """Where a trainer's tests of checkpoints are: files below a folder, and words of pytest's -k."""

    replace: str
    files: Sequence[str]
    words: str = ""
    options: Sequence[str] = ()


SUITES = {
    "lightning": Suite(
        "replace_plugin",
        (
            "callbacks/test_model_checkpoint_additional_cases.py",
            "callbacks/test_model_checkpoint_edge_cases.py",
            "callbacks/test_model_checkpoint_manual_opt.py",
            "callbacks/test_model_checkpoint_step_interval_val_metric.py",
            "checkpointing/test_checkpoint_callback_frequency.py",
            "checkpointing/test_model_checkpoint.py",
            "checkpointing/test_trainer_checkpoint.py",
            "core/test_saving.py",
            "models/test_restore.py",
            "plugins/test_checkpoint_io_plugin.py",
            "trainer/connectors/test_checkpoint_connector.py",
        ),
        options=("--import-mode=prepend",),
    ),
    "fabric": Suite(
        "replace_plugin",
        ("test_fabric.py", "strategies/test_strategy.py"),
        words="(checkpoint or save or load) and not dataloader",
        options=("--import-mode=prepend",),
    ),
    "transformers": Suite(
        "replace_trainer",
        ("test_trainer.py", "test_trainer_checkpointing.py", "test_trainer_jit_checkpoint.py"),
        words="checkpoint or resum or save or best or interrupted or auto_batch",
    ),
}


def replace_plugin() -> None:
    """Put ours where TorchCheckpointIO is made, in this process."""
    import lightning.fabric.strategies.strategy
    import lightning.fabric.utilities.cloud_io
    import lightning.pytorch.core.saving
    import lightning.pytorch.strategies.strategy
    import torch

    from asyncckpt.integrations.lightning import AsyncCheckpointIO

    class Plugin(AsyncCheckpointIO):
        def __init__(self) -> None:
            super().__init__(durability="none")

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            self.teardown()
            for thread in threading.enumerate():
                if thread.name.startswith("asyncckpt"):
                    thread.join(THREAD_SECONDS_MAX)

    def reading_directories(load: Any) -> Any:
        def load_either(file: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(file, str | os.PathLike) and os.path.isdir(file):
                return Plugin().load_checkpoint(file)
            return load(file, *arguments, **named)

        return load_either

    isfile = os.path.isfile

    def is_file_to_tests(path: Any) -> bool:
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        return isfile(path) or (
            asked_by.startswith(("tests_pytorch.", "tests_fabric.")) and os.path.isdir(os.path.join(path, "manifests"))
        )

    os.path.isfile = is_file_to_tests
    torch.load = reading_directories(torch.load)
    loading, saving = lightning.fabric.utilities.cloud_io, lightning.pytorch.core.saving
    loading._load = saving.pl_load = reading_directories(loading._load)  # type: ignore[attr-defined]
    for module in (lightning.fabric.strategies.strategy, lightning.pytorch.strategies.strategy):
        module.TorchCheckpointIO = Plugin  # type: ignore[attr-defined]


def replace_trainer() -> None:
    """Put our Trainer where Hugging Face's is, in this process."""
    import transformers

    from asyncckpt.integrations.transformers import CheckpointMixin

    class Trainer(CheckpointMixin, transformers.Trainer):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, discard_newer=True, **named)

    transformers.Trainer = transformers.trainer.Trainer = Trainer


def main(name: str, folder: Path, wanted: Sequence[str]) -> int:
    suite = SUITES[name]
    tests = [folder / test for test in wanted or suite.files if (folder / test.split("::")[0]).exists()]
    options = [*suite.options, *(["-k", suite.words] if suite.words and not wanted else [])]
    code = f"from bench.trainer_tests import {suite.replace}\n{suite.replace}()\n"
    own, ours = (run_tests(folder.parent.parent, tests, code if is_ours else "", *options) for is_ours in (False, True))
    print(table(own, ours))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]))
