"""The program as a process: it starts at once, counted in modules and not in seconds, and it behaves in pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from asyncckpt.version import __version__

SLOW = ("torch", "numpy", "asyncio", "rich", "typer")
LONG_NAME = "tensor_" * 50 + "\u00e9"
PROGRAM = """
import json, runpy, sys
try:
    runpy.run_module("asyncckpt", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    print(json.dumps([ended.code, sorted(sys.modules)]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "run"
    state = {"x": torch.ones(2, dtype=torch.bfloat16), LONG_NAME: torch.ones(1), "epoch": 3}
    with asyncckpt.Saver(path=path, tensors=state) as saver:
        saver.save(1)
    return path


def modules_of(*arguments: object) -> tuple[str, set[str]]:
    """Run the program; return what it prints, and which modules it has imported."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    code, modules = json.loads(done.stderr)
    assert code == 0, done.stderr
    return done.stdout, set(modules)


def program(*arguments: object, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncckpt", *map(str, arguments)]
    changed = {**os.environ, **environment}
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=changed, timeout=120
    )


LOOKS = [["--help"], ["--version"], ["ls", "DIR"], ["show", "DIR"], ["show", "DIR", "--json"], ["tree", "DIR"]]


@pytest.mark.parametrize("arguments", LOOKS)
def test_what_only_looks_imports_nothing_slow(directory: Path, arguments: list[str]) -> None:
    printed, modules = modules_of(*(directory if word == "DIR" else word for word in arguments))
    assert printed
    assert modules.isdisjoint(SLOW)


def test_the_package_imports_nothing_slow() -> None:
    code = "import asyncckpt, sys; dir(asyncckpt); asyncckpt.CheckpointError; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not [name for name in SLOW if f"'{name}'" in done.stdout]


def test_verify_imports_no_torch_and_shows_that_slow_modules_are_seen(directory: Path) -> None:
    assert modules_of("verify", directory)[1].intersection(SLOW) == {"numpy"}


def test_the_version_is_one() -> None:
    assert asyncckpt.__version__ == __version__
    assert program("--version").stdout == f"asyncckpt {__version__}\n"


def test_without_arguments_it_says_how_it_is_used() -> None:
    done = program()
    assert done.returncode == ExitCode.USAGE
    assert "usage: asyncckpt" in done.stdout


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="there is no SIGPIPE on Windows")
def test_a_reader_that_has_had_enough_ends_it_quietly(directory: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = program("show", directory, stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == -signal.SIGPIPE  # As `ls` and `cat` end, and as shells expect it.
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_answer_that_cannot_be_printed_is_an_error(directory: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = program("ls", directory, stdout=full)
    finally:
        os.close(full)
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.startswith("asyncckpt: the answer cannot be printed: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", ["20", "80", "500"])
def test_nothing_is_cut_off(directory: Path, columns: str) -> None:
    printed = program("show", directory, COLUMNS=columns, PYTHONIOENCODING="utf-8").stdout
    [line] = [line for line in printed.splitlines() if line.startswith("tensor_")]
    assert line.split()[0] == LONG_NAME
    assert line.split()[-2].endswith(".safetensors")


def test_an_output_that_cannot_show_a_name_gets_escapes(directory: Path) -> None:
    done = program("show", directory, PYTHONIOENCODING="ascii")
    assert done.returncode == ExitCode.OK
    assert LONG_NAME.replace("\u00e9", r"\xe9") in done.stdout


def test_show_tells_plain_values(directory: Path) -> None:
    assert ["epoch", "3"] in [line.split() for line in program("show", directory).stdout.splitlines()]
    assert json.loads(program("show", directory, "--json").stdout)["values"] == {"epoch": 3}


@pytest.mark.parametrize("closed", [1, 2])
@pytest.mark.parametrize("words", [["ls", "DIR"], ["show", "DIR"], ["--help"], ["--version"], ["ls", "nowhere"]])
def test_a_closed_stream_is_no_traceback(directory: Path, words: list[str], closed: int) -> None:
    """As under cron and daemons. An answer that nobody can get is no success."""
    arguments = [str(directory) if word == "DIR" else word for word in words]
    shell = f'exec "$@" {closed}>&-'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-m", "asyncckpt", *arguments],
        capture_output=True, text=True, timeout=120, cwd=directory.parent,
    )  # fmt: skip
    expected = ExitCode.NOT_FOUND if "nowhere" in words else ExitCode.FAILED if closed == 1 else ExitCode.OK
    assert (done.returncode, "Traceback" in done.stderr) == (expected, False), done.stderr
    if closed == 1:
        assert len(done.stderr.splitlines()) == 1
