"""A process whose cgroup leaves little memory is not killed by a save or a load: these are slower, or refused.

So it is promised from 64 MiB above 1.05 times the trainer's own peak on, and 16 MiB more for a table over levels.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.limits import trainer_in_a_cgroup
from tests.shares import share_of

PROGRAM = Path(trainer_in_a_cgroup.__file__)
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
MIB = 1 << 20


@dataclass(frozen=True)
class Group:
    """A memory cgroup of our own."""

    folder: Path
    limit: str
    peak: str

    @staticmethod
    @contextlib.contextmanager
    def made(name: str) -> Iterator[Group]:
        is_v1 = (V1 / "memory.limit_in_bytes").exists()
        files = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if is_v1 else ("memory.max", "memory.peak")
        group = Group((V1 if is_v1 else V2) / name, *files)
        try:
            group.folder.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")
        try:
            if not (group.folder / group.limit).exists():
                pytest.skip(f"cgroups of {group.folder.parent} have no limit of memory")
            yield group
        finally:
            group.folder.rmdir()

    def run(self, path: Path, every: str, seed: int, levels: int, *, limit: int | None) -> tuple[int, str, int]:
        """Run the trainer in it; return its exit code, what it has printed, and the most that it has used."""
        if limit is not None:
            (self.folder / self.limit).write_text(str(limit))
        command = f'echo $$ > {self.folder}/cgroup.procs; exec "$@"'
        arguments = [sys.executable, str(PROGRAM), str(path), every, str(seed), str(levels)]
        ran = subprocess.run(
            ["sh", "-c", command, "sh", *arguments], capture_output=True, text=True, check=False, timeout=200
        )
        return ran.returncode, ran.stdout + ran.stderr, int((self.folder / self.peak).read_text())


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
        code, said, peak = group.run(folder / "nothing", "inf", seed, levels, limit=None)
    assert code == 0, said
    limit = int(1.05 * peak) + (48 + 16 * levels) * MIB + random.Random(seed).choice([0, 0, 16, 64, 256]) * MIB
    for turn in range(2):  # The second one restores.
        with Group.made(f"asyncckpt-{seed}-{levels}-{turn}") as group:
            code, said, most = group.run(folder / "ckpt", "3", seed, levels, limit=limit)
        used = f"{limit >> 20} MiB, {most >> 20} used, {peak >> 20} without saves"
        assert code == 0, f"{code} with {used}: {said[-2000:]}"
