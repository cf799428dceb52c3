"""Lightning's own tests of checkpoints, with its own plugin and with AsyncCheckpointIO in its place.

    .venv-integrations/bin/python -m bench.lightning_tests <pytorch-lightning>/tests/tests_pytorch [file[::test] ...]

For whoever has a checkout of Lightning; the package that is installed is tested. The tests need cloudpickle,
jsonargparse, tensorboard, omegaconf and scikit-learn. TorchCheckpointIO is replaced in every process by a sitecustomize
module. The tests look at files and threads as soon as something was saved, so every save is waited for here, and
`torch.load` reads our directories. Everything else is pytest's. Prints for each file how many pass with Lightning's own
plugin, how many of these with ours, and why the others do not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.upstream_tests import prepared_environment, pytest_command

FILES = (
    "checkpointing/test_model_checkpoint.py",
    "checkpointing/test_trainer_checkpoint.py",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "models/test_restore.py",
    "trainer/connectors/test_checkpoint_connector.py",
)
TEST_SECONDS_MAX = 300
THREAD_SECONDS_MAX = 30
WHY_LENGTH_MAX = 160


def replace_plugin() -> None:
    """Put ours where TorchCheckpointIO is made, in this process."""
    import lightning.fabric.strategies.strategy
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

    load = torch.load

    def load_either(file: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(file, str | os.PathLike) and os.path.isdir(file):
            return Plugin().load_checkpoint(file)
        return load(file, *arguments, **named)

    torch.load = load_either
    for module in (lightning.fabric.strategies.strategy, lightning.pytorch.strategies.strategy):
        module.TorchCheckpointIO = Plugin  # type: ignore[attr-defined]


def run_tests(folder: Path, wanted: list[str], *, ours: bool) -> dict[str, tuple[str, str]]:
    """Run tests; return what each did and why, by its file and name."""
    code = "from bench.lightning_tests import replace_plugin\nreplace_plugin()\n" if ours else ""
    with tempfile.TemporaryDirectory() as place, prepared_environment(code, folder.parent) as environment:
        found = Path(place) / "found.xml"
        options = [f"--timeout={TEST_SECONDS_MAX}", f"--junitxml={found}", "-o", "junit_family=xunit1", "-W", "ignore"]
        options += ["-o", "addopts=", "--import-mode=prepend", f"--basetemp={place}/tests"]
        command = pytest_command(folder.parent.parent, [str(folder / name) for name in wanted], *options)
        command = [word for word in command if word not in ("-n", "0")]  # There is no xdist.
        done = subprocess.run(command, cwd=place, env=environment, check=False, capture_output=True, text=True)
        if not found.exists():
            raise RuntimeError(f"the tests did not come to their end:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        cases = list(ElementTree.parse(found).iter("testcase"))
    return {f"{case.get('file', '').split('tests_pytorch/')[-1]}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind in ("failure", "error", "skipped"):
        said = case.find(kind)
        if said is not None:
            return kind, " ".join((said.get("message") or "").split())[:WHY_LENGTH_MAX]
    return "passed", ""


def table(own: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]]) -> str:
    """Return lines of text: a row for each file, and below it what passes with Lightning's own and fails with ours."""
    passed = [test for test, (kind, _) in own.items() if kind == "passed"]
    failed = {test: ours.get(test, ("failure", "did not run")) for test in passed}
    failed = {test: outcome for test, outcome in failed.items() if outcome[0] != "passed"}
    lines = ["| file | own | ours | neither counts |", "|---|---|---|---|"]
    for file in [*sorted({test.split("::")[0] for test in own}), ""]:
        kinds = Counter(kind for test, (kind, _) in own.items() if test.startswith(file))
        ours_count = kinds["passed"] - sum(test.startswith(file) for test in failed)
        neither = f"{kinds['failure'] + kinds['error']} fail, {kinds['skipped']} skipped"
        lines.append(f"| {file or 'all'} | {kinds['passed']} | {ours_count} | {neither} |")
    return "\n".join([*lines, "", *(f"{test}: {why}" for test, (_, why) in failed.items())])


def main(folder: Path, wanted: list[str]) -> int:
    own, ours = (run_tests(folder, wanted or list(FILES), ours=is_ours) for is_ours in (False, True))
    print(table(own, ours))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
