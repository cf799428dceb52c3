"""Megatron-Core's own tests of dist_checkpointing, with its own strategies and with ours in their place.

    python -m bench.megatron_tests <Megatron-LM>/tests/unit_tests/dist_checkpointing [file or file::test ...]

For whoever has a checkout of Megatron-LM; its modules are used, and need six, regex, einops and pyyaml. The tests run
on the CPU with gloo, in one process for each rank (--ranks 1 8), prepared by cuda_as_cpu.py. A test passes when it
passes on all ranks. Prints for each file how many pass with Megatron's own strategies, how many of these with ours, and
which do not. --why: also why tests fail with both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from bench.megatron_rank import PORT, REPORT, WHOSE
from bench.upstream_tests import FOLDERS, prepared_environment, pytest_command

# But for the processes that multiprocessing starts for itself alone.
PREPARE = """
if not any("resource_tracker" in argument for argument in sys.orig_argv):
    from bench.cuda_as_cpu import use_cpu
    use_cpu()
"""
TEST_SECONDS_MAX = 600
SESSION_SECONDS_MAX = 3 * 3600


@dataclass(frozen=True)
class Outcome:
    """What a test did on all ranks, and why it failed on the first one on which it did."""

    kind: str
    why: str


def run_tests(folder: Path, wanted: Sequence[str], *, ranks_count: int, whose: str) -> dict[str, Outcome]:
    """Run the tests of a folder, with "own" strategies or "ours"; returns what each did, by its file and name."""
    root = next(path for path in folder.parents if (path / "tests").is_dir())
    tests = [str(folder / name) for name in wanted] or [str(folder)]
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as place, prepared_environment(PREPARE, root) as prepared:
        ranks = []
        for rank in range(ranks_count):
            own = Path(place) / str(rank)
            named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks_count, "OMP_NUM_THREADS": 1}
            named |= {PORT: store.port, WHOSE: whose, REPORT: own.with_suffix(".json"), "GLOO_SOCKET_IFNAME": "lo"}
            environment = prepared | {name: str(value) for name, value in named.items()}
            options = ["-p", "bench.megatron_rank", "-o", "addopts=", "-W", "ignore", "--continue-on-collection-errors"]
            limits = [f"--timeout={TEST_SECONDS_MAX}", f"--basetemp={own}", "--log-level=WARNING"]
            command = pytest_command(root, tests, *options, *limits)
            with own.with_suffix(".txt").open("w") as out:
                ranks.append(
                    subprocess.Popen(command, cwd=root, env=environment, stdout=out, stderr=out, start_new_session=True)
                )
        try:
            for process in ranks:
                process.wait(SESSION_SECONDS_MAX)
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # Also the workers that tests have left.
                process.wait()
        reports = [_report(Path(place) / f"{rank}.json") for rank in range(ranks_count)]
        for rank, process in enumerate(ranks):
            if process.returncode or not reports[rank]:
                said = (Path(place) / f"{rank}.txt").read_text()
                raise RuntimeError(f"rank {rank} with {whose} strategies did not come to its end:\n{said[-4000:]}")
    return {test: _together([report.get(test) for report in reports]) for test in reports[0]}


def _report(path: Path) -> dict[str, Outcome]:
    """Return what the tests did on one rank; of one that was begun twice, the last."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {_name(line["test"]): Outcome(line["outcome"], line["why"]) for line in lines}


def _name(test: str) -> str:
    return test.split("dist_checkpointing/", 1)[-1]


def _together(outcomes: Sequence[Outcome | None]) -> Outcome:
    for rank, one in enumerate(outcomes):
        if one is None:
            return Outcome("failed", f"rank {rank} did not come to its end")
        if one.kind != "passed":
            return Outcome(one.kind, f"rank {rank}: {FOLDERS.sub('', one.why)}")
    return Outcome("passed", "")


def table(ranks_count: int, own: dict[str, Outcome], ours: dict[str, Outcome]) -> str:
    """Return lines of text: a row for each file, and below it what passes with Megatron's own and fails with ours."""
    files = sorted({test.split("::")[0] for test in own})
    lines = [f"{ranks_count} rank{'s' if ranks_count > 1 else ''}", ""]
    lines += ["file                                     own   ours   neither counts", "-" * 68]
    failed = {test: ours.get(test, Outcome("failed", "did not run")) for test in own if own[test].kind == "passed"}
    failed = {test: outcome for test, outcome in failed.items() if outcome.kind != "passed"}
    totals: Counter[str] = Counter()
    for file in files:
        kinds = Counter(outcome.kind for test, outcome in own.items() if test.split("::")[0] == file)
        kinds["ours"] = kinds["passed"] - sum(test.split("::")[0] == file for test in failed)
        totals += kinds
        lines.append(_row(file, kinds))
    lines += [_row("all", totals), ""]
    lines += [f"fails with ours only: {test}\n    {outcome.why}" for test, outcome in failed.items()]
    return "\n".join(lines)


def _row(name: str, kinds: Counter[str]) -> str:
    neither = f"{kinds['failed']} fail, {kinds['skipped']} skipped"
    return f"{name:38} {kinds['passed']:5} {kinds['ours']:6}   {neither}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.megatron_tests", description="Megatron's own tests with our strategies"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--why", action="store_true", help="also why tests fail with Megatron's own strategies")
    given = parser.parse_args(arguments)
    for ranks_count in given.ranks:
        own, ours = (
            run_tests(given.folder.resolve(), given.tests, ranks_count=ranks_count, whose=whose)
            for whose in ("own", "ours")
        )
        print(table(ranks_count, own, ours), flush=True)
        for test, outcome in own.items() if given.why else ():
            if outcome.kind != "passed":
                print(f"{outcome.kind} with own: {test}\n    {outcome.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
