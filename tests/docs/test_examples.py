"""The examples run, and an interrupted run ends like one that was not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS_MAX = 120


def run(example: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / example), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run("resume.py", tmp_path / "whole", "--steps", 60, "--every", 20)
    run("resume.py", tmp_path / "parts", "--steps", 30, "--every", 10)
    rest = run("resume.py", tmp_path / "parts", "--steps", 60, "--every", 20)
    assert "resumed at step" in rest
    assert rest.splitlines()[-1] == whole.splitlines()[-1]


def test_export_makes_a_smaller_checkpoint(tmp_path: Path) -> None:
    run("resume.py", tmp_path / "run", "--steps", 20, "--every", 20)
    printed = run("export.py", tmp_path / "run", tmp_path / "serving")
    before, after = (int(word) for word in printed.split() if word.isdigit() and int(word) > 100_000)
    assert after < before / 2
