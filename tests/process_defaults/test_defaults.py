"""Tests of saves and loads hold under other defaults of the process; a share of one default's tests in `make test`.

What runs is drawn by ASYNCCKPT_SHARE (tests/shares.py). `make test-slow` runs all of them under all defaults.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.process_defaults.defaults import DEFAULTS, PACKAGE, MetaInPackage
from tests.shares import share_of

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 1500
NOTHING_COLLECTED = 5
FILES = [
    *(f"tests/bad_input/test_{name}.py" for name in ("load_targets", "moved_directories", "paths", "saver_tensors")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/chains").glob("test_*.py")),
    "tests/dcp/test_one_process.py",
    *(f"tests/deltas/test_{name}.py" for name in ("chain_of_saves", "kinds", "writes_of_others")),
    "tests/embcache/test_saver.py",
    *(
        f"tests/end_to_end/test_{name}.py"
        for name in (
            *("cast", "changes_between_saves", "checkpointer", "compaction", "filters", "follow", "inspection"),
            *("load_as_dict", "loading", "multi_level", "periodic", "registered_objects", "restored_values"),
            *("round_trip", "save_modes", "save_once", "shared_memory", "two_savers", "write_filter"),
        )
    ),
    "tests/formats/test_torch_file.py",
    *(f"tests/recis/test_{name}.py" for name in ("loading", "writing")),
    *(f"tests/trainer_state/test_{name}.py" for name in ("data_position", "plain", "rng", "sampler", "trainer")),
]


def run_under(name: str, files: list[str], *, every: int = 1) -> subprocess.CompletedProcess[str]:
    """Run tests in a process that has a default; of many, one in `every`."""
    default = DEFAULTS[name]
    environment = default.environment | {"ASYNCCKPT_DEFAULT": name, "ASYNCCKPT_TESTS_EVERY": str(every)}
    plugin = ["-p", "tests.process_defaults.defaults", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words = [sys.executable, *default.options, "-m", "pytest", "-q", "--tb=short", *plugin, *default.pytest_options]
    words += files
    print("env", *(shlex.quote(f"{key}={value}") for key, value in environment.items()), shlex.join(words))
    return subprocess.run(
        words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )


@pytest.mark.parametrize("name", share_of(DEFAULTS, "defaults of a process", every=len(DEFAULTS)))
def test_saves_and_loads_hold_under_a_default(name: str) -> None:
    files = share_of(FILES, f"files under {name}", every=len(FILES))
    done = run_under(name, files, every=6)
    assert done.returncode in (0, NOTHING_COLLECTED), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
@pytest.mark.parametrize("name", DEFAULTS)
def test_all_saves_and_loads_hold_under_a_default(name: str) -> None:
    done = run_under(name, FILES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_default_device_moves_what_the_package_makes_alone() -> None:
    found: dict[str, torch.Tensor] = {}
    with MetaInPackage(torch.device("meta")):
        exec(compile("import torch; made = torch.empty(1)", PACKAGE + "planted.py", "exec"), found)
        own = torch.empty(1)
    assert (found["made"].device.type, own.device.type) == ("meta", "cpu")


@pytest.mark.slow
def test_a_test_that_does_not_hold_under_a_default_is_seen(tmp_path: Path) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text("import warnings\n\n\ndef test_it():\n    warnings.warn('planted')\n")
    words = ["-c", "pyproject.toml", str(planted)]
    assert run_under("umask 077", words).returncode == 0
    assert run_under("warnings", words).returncode == 1
