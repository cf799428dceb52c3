"""bench/gpu_run.sh says of every part how it ended, goes on behind a failure, and is over in time; without a GPU too.

make, the compiler and the sanitizer are stand-ins here; the Python that looks for a device is the real one once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu_run.sh"
SECONDS_MAX = 60
PARTS = {
    "a": ["build", "tests", "table-suites", "probe"],
    "b": ["build", "sanitizer", "twin", "demo"],
    "c": ["build", "bench"],
}
MAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
case " $FAILING " in *" $1 "*) echo "no such luck"; exit 2;; esac
case " $HANGING " in *" $1 "*) sleep 50;; esac
"""
NVCC = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\\necho probed\\n' > "$2"
chmod +x "$2"
"""


class Machine:
    """A machine with a GPU, as far as the script can tell."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.out, self.calls_file = folder / "programs", folder / "out", folder / "calls"
        self.programs.mkdir()
        self.add("make", MAKE)
        self.add("nvcc", NVCC)
        self.add("compute-sanitizer", "#!/bin/sh\n")
        self.add("python", '#!/bin/sh\n[ "$1" = -c ] || echo "cuda:0 a device"\n')
        self.python = str(self.programs / "python")

    def add(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": os.environ.get("HOME", "/"),
            "OUT": str(self.out),
            "CALLS": str(self.calls_file),
            "GPU_PYTHON": self.python,
            **environment,
        }
        return subprocess.run(
            [str(SCRIPT), *arguments], env=environment, timeout=SECONDS_MAX, capture_output=True, text=True, check=False
        )

    def ends(self, letter: str) -> dict[str, str]:
        """How each part ended, in the order in which they did."""
        report = (self.out / f"{letter}.txt").read_text()
        found = re.findall(r"^(ok|FAILED|CUT|NOT RUN) +([\w-]+)", report, re.MULTILINE)
        return {part: end for end, part in found}

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("letter", PARTS)
def test_every_part_runs(machine: Machine, letter: str) -> None:
    done = machine.run(letter, COMMIT="0123abc")
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.ends(letter) == dict.fromkeys(PARTS[letter], "ok")
    report = (machine.out / f"{letter}.txt").read_text()
    for fact in (r"date +\d{4}-", "commit +0123abc", "device +cuda:0 a device", r"host +\d+ cores"):
        assert re.search(fact, report), fact
    assert {path.name for path in machine.out.iterdir()} == {
        f"{letter}.txt",
        *(f"{letter}-{part}.log" for part in PARTS[letter]),
    }


def test_the_bench_is_told_what_follows(machine: Machine) -> None:
    machine.run("c", "--gib", "2")
    assert machine.calls()[-1].startswith("bench-gpu ARGS=")
    assert machine.calls()[-1].endswith(f"--out {machine.out}/gpu --gib 2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_runs_and_it_says_so(machine: Machine) -> None:
    done = machine.run("a", GPU_PYTHON=sys.executable)
    assert done.returncode == 1
    assert machine.ends("a") == dict.fromkeys(PARTS["a"], "NOT RUN")
    assert re.search("NOT RUN +tests: the GPU suite cannot run here: torch", done.stdout), done.stdout
    assert machine.calls() == []


@pytest.mark.parametrize("letter", PARTS)
def test_without_torch_nothing_runs_either(machine: Machine, letter: str) -> None:
    machine.add("python", "#!/bin/sh\necho \"No module named 'torch'\" >&2\nexit 1\n")
    done = machine.run(letter)
    assert done.returncode == 1
    assert machine.ends(letter) == dict.fromkeys(PARTS[letter], "NOT RUN")
    assert "NOT RUN  build: No module named 'torch'" in done.stdout


def test_behind_a_failure_it_goes_on(machine: Machine) -> None:
    done = machine.run("a", FAILING="test-gpu")
    assert done.returncode == 1
    assert machine.ends("a") == {"build": "ok", "tests": "FAILED", "table-suites": "FAILED", "probe": "ok"}
    assert "no such luck" in done.stdout


def test_without_a_package_only_what_needs_it_is_left_out(machine: Machine) -> None:
    done = machine.run("a", FAILING="gpu-package")
    assert done.returncode == 1
    assert machine.ends("a") == {"build": "FAILED", "tests": "NOT RUN", "table-suites": "NOT RUN", "probe": "ok"}
    assert "NOT RUN  tests: the build has failed" in done.stdout


def test_a_part_that_hangs_is_cut_and_the_time_is_kept(machine: Machine) -> None:
    done = machine.run("a", HANGING="test-gpu", SECONDS_MAX="2")
    assert done.returncode == 1
    assert machine.ends("a") == {"build": "ok", "tests": "CUT", "table-suites": "NOT RUN", "probe": "NOT RUN"}
    assert "NOT RUN  probe: no time is left" in done.stdout


def test_what_is_not_installed_is_named(machine: Machine) -> None:
    (machine.programs / "compute-sanitizer").unlink()
    done = machine.run("b")
    assert done.returncode == 1
    assert machine.ends("b") == {"build": "ok", "sanitizer": "NOT RUN", "twin": "ok", "demo": "ok"}
    assert "NOT RUN  sanitizer: compute-sanitizer is not found" in done.stdout


def test_a_wrong_letter_is_told_what_there_is(machine: Machine) -> None:
    done = machine.run("d")
    assert done.returncode == 2
    assert "bench/gpu_run.sh a " in done.stderr


def test_what_it_names_is_there() -> None:
    text = SCRIPT.read_text()
    for path in re.findall(r"(?:tests|bench)/[\w/]+\.(?:py|cu|sh)", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"-k (test_\w+)", text):
        assert (ROOT / "tests" / "gpu" / f"{name}.py").exists(), name
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z]+-[a-z]+)", text):
        assert f"\n{target}:" in makefile, target
