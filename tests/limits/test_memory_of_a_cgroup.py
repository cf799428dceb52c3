"""A process whose cgroup leaves little memory is not killed by a save or a load: these are slower, or refused.

So it is promised from 64 MiB above 1.05 times the trainer's own peak on, and 16 MiB more for a table over levels.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import trainer_in_a_cgroup
from tests.limits.cgroups import MIB, Group
from tests.shares import share_of

PROGRAM = Path(trainer_in_a_cgroup.__file__)


def run_in(group: Group, path: Path, every: str, seed: int, levels: int, *, limit: int | None) -> tuple[int, str, int]:
    """Run the trainer in it; return its exit code, what it has printed, and the most that it has used."""
    arguments = [sys.executable, str(PROGRAM), str(path), every, str(seed), str(levels)]
    command = [*group.command(limit=limit), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    return ran.returncode, ran.stdout + ran.stderr, group.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("seed", share_of(range(40), "memory of a cgroup"))
def test_no_save_and_no_load_ends_a_process(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, levels=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", share_of(range(6), "memory of a cgroup, levels"))
def test_no_save_of_tables_over_levels_ends_a_process(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, levels=2)


def check(folder: Path, seed: int, *, levels: int) -> None:
    """Train with as much memory as it takes without saves, by 1.05, and what is promised, or more."""
    with Group.made(f"asyncckpt-{seed}-{levels}-peak") as group:
        code, said, peak = run_in(group, folder / "nothing", "inf", seed, levels, limit=None)
    assert code == 0, said
    limit = int(1.05 * peak) + (48 + 16 * levels) * MIB + random.Random(seed).choice([0, 0, 16, 64, 256]) * MIB
    for turn in range(2):  # The second one restores.
        with Group.made(f"asyncckpt-{seed}-{levels}-{turn}") as group:
            code, said, most = run_in(group, folder / "ckpt", "3", seed, levels, limit=limit)
        used = f"{limit >> 20} MiB, {most >> 20} used, {peak >> 20} without saves"
        assert code == 0, f"{code} with {used}: {said[-2000:]}"
