"""The package gets lighter, or says by how much it gets heavier and what for (limits.py)."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.native import core
from bench.path import CASES, PathSpec
from bench.rounds import run_child
from tests.ratchet.limits import BUDGET, DOORS, LAW, MODULES_OF_A_SAVE

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "asyncckpt"
COUNTED_WITH = "native", "2.13"
AS_COUNTED = pytest.mark.skipif(
    (core.implementation, ".".join(torch.__version__.split(".")[:2])) != COUNTED_WITH,
    reason="the ways were counted with the native core and torch 2.13",
)
FUNCTIONS_SPARE = 5  # Some file systems need a function less.
MODULES = """
import sys, torch, asyncckpt.saver
with asyncckpt.Saver(path=sys.argv[1], tensors={"w": torch.ones(3)}) as saver:
    saver.save_async(1).result()
print(sum(name.partition(".")[0] == "asyncckpt" for name in sys.modules))
"""


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in files)


def sources(folder: Path, *suffixes: str) -> list[Path]:
    return [file for file in folder.rglob("*") if file.suffix in suffixes and file.is_file()]


def is_door(file: Path) -> bool:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py") in DOORS


def public_names() -> int:
    """Count the names in `__all__` of the modules that users import from."""
    files = [*PACKAGE.glob("*.py"), *filter(is_door, sources(PACKAGE, ".py"))]
    files += [
        PACKAGE / "tables/__init__.py",
        PACKAGE / "trainer_state/__init__.py",
        *PACKAGE.glob("format/encodings/__init__.py"),
    ]
    found = 0
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if [name for name in targets if isinstance(name, ast.Name) and name.id == "__all__"]:
                found += len(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return found


def parameters() -> int:
    public = [getattr(asyncckpt, name) for name in asyncckpt.__all__]
    own = [one for one in public if callable(one) and not (isinstance(one, type) and issubclass(one, Exception))]
    return sum(len(inspect.signature(one).parameters) for one in own)


COUNTED: dict[str, Callable[[], int]] = {
    "lines of the core": lambda: lines(file for file in sources(PACKAGE, ".py") if not is_door(file)),
    "lines of doors": lambda: lines(filter(is_door, sources(PACKAGE, ".py"))),
    "lines of csrc": lambda: lines(sources(ROOT / "csrc", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh")),
    "lines of tests": lambda: lines(sources(ROOT / "tests", ".py")),
    "public names": public_names,
    "parameters of public names": parameters,
}


def files_crossed(folder: Path, way: str) -> dict[str, list[str]]:
    """Return the functions that a way crosses, by file."""
    saved = folder / "saved"
    saved.mkdir(parents=True)
    crossed, _ = run_child("bench.path", asdict(PathSpec(str(folder / "figures"), str(saved), way)))
    return crossed


def crossed_by(folder: Path, way: str) -> tuple[int, int]:
    """Return how many files and functions a way crosses."""
    crossed = files_crossed(folder, way)
    return len(crossed), sum(map(len, crossed.values()))


@AS_COUNTED
@pytest.mark.parametrize("way", CASES)
def test_a_way_crosses_no_more_than_it_did(tmp_path: Path, way: str) -> None:
    found = crossed_by(tmp_path / "0", way)
    if found > LAW[way]:  # Other processes have the cores: a thread may have waited for another one each time.
        found = min(found, *(crossed_by(tmp_path / str(number), way) for number in range(1, 4)))
    more = [name for name, one, limit in zip(("files", "functions"), found, LAW[way], strict=True) if one > limit]
    assert not more, f"{way} crosses {found}, more than {LAW[way]}: python -m bench path --list"
    kept = LAW[way][0], LAW[way][1] - FUNCTIONS_SPARE
    assert found >= kept, (
        f"{way} crosses {found}, less than {LAW[way]}: write it into limits.py, so that it stays there"
    )


# What a plain save was not asked for: features, and what they need.
ABSENT = (
    *("engine/features/", "engine/ranks/", "engine/upload/", "engine/compact/", "coordination/", "devices/"),
    *("pipeline/filter", "pipeline/row_filters", "commit/removal", "commit/retention", "commit/keep", "commit/store_"),
    *("adapters/", "observe/", "events", "model/event"),
)


def test_a_plain_save_crosses_nothing_that_it_was_not_asked_for(tmp_path: Path) -> None:
    assert [file for file in files_crossed(tmp_path, "save") if file.startswith(ABSENT)] == []
    of_deltas = files_crossed(tmp_path / "delta", "delta")
    assert "engine/features/deltas.py" in of_deltas, "the trace sees features"


@AS_COUNTED
def test_a_save_loads_no_more_modules_than_it_did(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MODULES, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = int(done.stdout)
    assert found <= MODULES_OF_A_SAVE, f"a save loads {found} modules"
    assert found > MODULES_OF_A_SAVE - 3, f"a save loads only {found} modules: write it into limits.py"


@pytest.mark.parametrize("what", COUNTED)
def test_the_budget_holds(what: str) -> None:
    found, limit = COUNTED[what](), sum(BUDGET[what].values())
    assert found <= limit, f"{found} {what}, at most {limit}: take something away, or write into limits.py what for"
