"""The script for the shell, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from asyncckpt.cli.commands import parser_of_all
from tests.program import invoke


def completed(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers for the last of some words."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    (tmp_path / "script").write_text(invoke("completion", "bash").stdout)
    line = " ".join(f"'{word}'" for word in ("asyncckpt", *words))
    program = (
        f'source ./script; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _asyncckpt; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_commands(tmp_path: Path) -> None:
    assert set(completed(tmp_path, "")) == {*parser_of_all()[1], "--help", "--version"}
    assert completed(tmp_path, "ve") == ["verify"]
    assert completed(tmp_path, "--v") == ["--version"]


def test_options_of_a_command(tmp_path: Path) -> None:
    assert completed(tmp_path, "verify", "--") == ["--help", "--all", "--json"]
    assert completed(tmp_path, "prune", "ckpt", "--dry") == ["--dry-run"]


def test_folders(tmp_path: Path) -> None:
    for name in ("my run", "my other run"):
        (tmp_path / name).mkdir()
    (tmp_path / "my file").write_text("")
    assert sorted(completed(tmp_path, "show", "my")) == ["my other run", "my run"]


def test_zsh_takes_the_same(tmp_path: Path) -> None:
    text = invoke("completion", "zsh").stdout
    assert "bashcompinit" in text
    assert text.endswith(invoke("completion", "bash").stdout)
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh here: the script was not run in it")
    done = subprocess.run(["zsh", "-f", "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
