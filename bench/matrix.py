"""Install the wheel of dist/ beside every Python and torch that can be had here, and run a part of the suite in each.

    make wheel matrix
    python3 -m bench.matrix python3.10:2.8.0 python3.13:2.15.0 --tests tests/unit

Needs nothing but a Python, binutils and a C compiler. Each pair has an environment of its own, which is removed. On
Linux, PyPI's torch is built for CUDA and asks for gigabytes of libraries that a CPU never calls. They are left out, and
libraries of their names stand in for them, whose functions all return an error; so torch finds no device.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14")
TORCHES = ("2.4.1", "2.8.0", "2.13.0", "2.15.0")
TESTS = (
    "tests/end_to_end/test_round_trip.py",
    "tests/end_to_end/test_load_as_dict.py",
    "tests/end_to_end/test_loading.py",
    "tests/end_to_end/test_periodic.py",
    "tests/end_to_end/test_compaction.py",
    "tests/dcp/test_convert.py",
    "tests/unit/tables",
)
# What torch imports, and what the suite does. setuptools: torch 2.4 needs it from Python 3.12 on.
NEEDED = [
    "filelock",
    "typing_extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "setuptools",
    "numpy",
    "aiofiles",
    "psutil",
    "xxhash",
]
NEEDED += ["pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors", "zstandard"]
SECONDS_MAX = 3600
FACTS = "import asyncckpt, platform, torch; from asyncckpt.native import implementation as core; "
FACTS += "print(platform.python_version(), torch.__version__, asyncckpt.__version__, core, sep='\\t')"
NO_DEVICE = 100


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.matrix", description=__doc__.splitlines()[0])
    every = [f"{python}:{torch}" for python in PYTHONS for torch in TORCHES]
    parser.add_argument("pairs", nargs="*", default=every, help="python3.10:2.8.0 and so on; default: each with each")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="arguments of pytest")
    parser.add_argument("--out", type=Path, help="default: bench/results/<today>-matrix.txt")
    asked = parser.parse_args()
    [wheel] = (REPOSITORY / "dist").glob("asyncckpt-*.whl")
    today = datetime.date.today().isoformat()
    out = asked.out or REPOSITORY / "bench" / "results" / f"{today}-matrix.txt"
    head = f"{today}  python3 -m bench.matrix {' '.join(sys.argv[1:])}\n{wheel.name}\n{platform.platform()}\n\n"
    rows = ["Python\ttorch\tasyncckpt\tcore\tsuite\tseconds"]
    for pair in asked.pairs:
        rows.append(run_pair(*pair.split(":"), wheel, asked.tests))
        out.write_text(head + table(rows), encoding="utf-8")
        print(rows[-1].replace("\t", "  "), flush=True)


def run_pair(python: str, torch: str, wheel: Path, tests: list[str]) -> str:
    """Return a row of the table."""
    found = (
        subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode if shutil.which(python) else 1
    )
    if found != 0:
        return f"{python.removeprefix('python')}\t{torch}\t\t\tthis Python cannot be had here\t"
    with tempfile.TemporaryDirectory(prefix="asyncckpt-matrix-") as folder:
        began = time.monotonic()
        try:
            program = installed(Path(folder), python, torch, wheel)
            facts = call(program, "-W", "error", "-c", FACTS, cwd=folder).stdout.strip().splitlines()[-1]
            suite = suite_of(Path(folder), program, tests)
        except subprocess.CalledProcessError as error:
            facts, suite = f"{python.removeprefix('python')}\t{torch}\t\t", last_line(error.stderr or error.stdout)
        return f"{facts}\t{suite}\t{time.monotonic() - began:.0f}"


def installed(folder: Path, python: str, torch: str, wheel: Path) -> str:
    """Return the Python of a new environment with the wheel and this torch."""
    call(python, "-m", "venv", str(folder / "venv"))
    program = str(folder / "venv" / "bin" / "python")
    pip = (program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    call(*pip, "--no-cache-dir", "--no-deps", f"torch=={torch}")
    call(*pip, *NEEDED)
    call(*pip, "--no-deps", str(wheel))
    [libraries] = (folder / "venv").glob("lib/python*/site-packages/torch/lib")
    make_stand_ins(libraries)
    return program


def suite_of(folder: Path, program: str, tests: list[str]) -> str:
    """Run tests against what is installed, not the sources: in a folder that has only the tests."""
    for name in ("tests", "bench", "csrc", "demo", "docs", "examples"):
        shutil.copytree(REPOSITORY / name, folder / "run" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(REPOSITORY / name, folder / "run")
    ran = call(program, "-m", "pytest", "-q", *tests, cwd=folder / "run", check=False)
    (REPOSITORY / "build").mkdir(exist_ok=True)
    with open(REPOSITORY / "build" / "matrix.log", "a", encoding="utf-8") as log:
        log.write(ran.stdout + ran.stderr)
    return last_line(ran.stdout).strip("= ")


# -- libraries that stand in for those of CUDA -------------------------------------------------------------------------


def make_stand_ins(libraries: Path) -> None:
    """Beside torch's libraries, make those that they need and nobody has, with all functions that nobody else has."""
    ours = sorted(path for path in libraries.glob("*.so*") if path.is_file())
    missing = sorted(
        {name for path in ours for name in needed_by(path)} - {path.name for path in ours} - system_libraries()
    )
    if not missing:
        return
    defined = {name for path in ours for name in symbols_of(path, "--defined-only")}
    wanted = {name for path in ours for name in symbols_of(path, "--undefined-only")}
    functions = sorted(
        name for name in wanted - defined if re.match(r"(cu|nv|nccl|cusp|__cuda|_?_?nvtx)[A-Za-z_]", name)
    )
    source = libraries / "stand_ins.c"
    texts = (
        f'const char *{name}(void) {{ return "no CUDA here"; }}'
        for name in functions
        if re.search("String|Name$", name)
    )
    numbers = (
        f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in functions if not re.search("String|Name$", name)
    )
    source.write_text("\n".join([*texts, *numbers]), encoding="utf-8")
    compiler = os.environ.get("CC", "cc")
    for number, name in enumerate(missing):
        script = libraries / "stand_ins.map"
        # The loader demands each version that somebody asks of a library; the functions themselves have none.
        versions = sorted({version for path in ours for version in versions_of(path, name)})
        script.write_text(
            "".join(f"{version} {{}};\n" for version in versions) or "{ global: *; };\n", encoding="utf-8"
        )
        sources = [str(source)] if number == 0 else ["-x", "c", os.devnull]
        linked = (f"-Wl,-soname,{name}", f"-Wl,--version-script={script}")
        call(compiler, "-shared", "-fPIC", "-o", str(libraries / name), *linked, *sources)


def needed_by(library: Path) -> list[str]:
    return re.findall(r"NEEDED +(\S+)", call("objdump", "-p", str(library)).stdout)


def versions_of(library: Path, name: str) -> list[str]:
    """Return the versions that a library asks of the one called `name`."""
    listed = call("objdump", "-p", str(library)).stdout
    found = re.search(rf"required from {re.escape(name)}:\n((?:    +0x.*\n)*)", listed)
    return [line.split()[-1] for line in found.group(1).splitlines()] if found else []


def symbols_of(library: Path, which: str) -> set[str]:
    listed = call("nm", "--dynamic", which, str(library), check=False).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip()}


def system_libraries() -> set[str]:
    return set(re.findall(r"^\s+(\S+) \(", call("ldconfig", "-p").stdout, re.MULTILINE))


# -- words ------------------------------------------------------------------------------------------------------------


def call(*command: str, cwd: str | Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ASYNCCKPT_NATIVE")}
    return subprocess.run(
        command, cwd=cwd, check=check, capture_output=True, text=True, timeout=SECONDS_MAX, env=environment
    )


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was printed"


def table(rows: list[str]) -> str:
    cells = [row.split("\t") for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
