"""What the commit of many ranks costs: messages, bytes and seconds, over a channel in memory and with effects that do
nothing. So this is the protocol alone, without files and without a network.

    python -m bench.ranks                           8 to 1000 ranks
    python -m bench.ranks --ranks 8 --out result    also writes result.json and result.txt

All ranks are coroutines of one process, with a thread each where they wait for messages. Their CPU time is divided by
their number. What grows with the ranks and is done by one is what rank 0 does: it is measured once more by itself, as
the time in which its machine takes the messages of all ranks in one thread, decoding included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from asyncckpt.coordination.actions import MakeFolder
from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import AttemptMessage, Begin, Limits, Outcome, Prepared, decode, encode
from asyncckpt.coordination.rank_machine import RankMachine
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Json
from bench.memory_channel import MemoryExchange
from bench.report import machine, make_console

RANKS = "8,64,256,1000"
CALLS_COUNT = 3
LIMITS = Limits()
DIGEST = "0123456789abcdef" * 2
# Of the size that a save gives: a chain of one parent, and one file of each rank.
BEGIN = Begin(
    step=1200,
    kind="delta",
    facts={"durability": "fsync"},
    notes={"replicas": DIGEST, "share": False, "parents": [[1100, DIGEST, DIGEST]]},
)
ATTEMPT_NOTES: dict[str, Json] = {"parents": [[1100, DIGEST, DIGEST]], "replicas": "same"}


def prepared_notes(rank: int, attempt: Attempt) -> dict[str, Json]:
    path = f"data/{attempt.directory}/r{rank:05d}-000.safetensors"
    return {
        "digest": DIGEST,
        "structure": DIGEST,
        "features": ["boxes", "delta"],
        "files": [[path, 1 << 16, DIGEST, 1 << 33]],
    }


@dataclass(frozen=True)
class RanksFigures:
    """Of one call with so many ranks; medians of calls where it is time. A broadcast is sent once, received by each."""

    ranks_count: int
    sent_count: int
    sent_bytes: int
    received_count: int
    received_bytes: int
    seconds: float
    cpu_ms_per_rank: float
    coordinator_ms: float


class NoEffects:
    """Everything succeeds at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def make_folder(self, begins: Mapping[int, Begin]) -> tuple[Attempt, Mapping[str, Json]]:
        return Attempt.new(begins[0].step), ATTEMPT_NOTES

    async def write(self, attempt: AttemptMessage) -> Mapping[str, Json]:
        return prepared_notes(self._rank, attempt.attempt)

    async def publish(self, attempt: Attempt, prepared: Mapping[int, Prepared]) -> Mapping[str, Json]:
        return {"digest": DIGEST}

    async def abandon(self, attempt: Attempt) -> None:
        raise AssertionError("nothing fails here")

    def stop(self) -> None:
        raise AssertionError("nothing ends early here")

    def is_committed(self, attempt: Attempt) -> bool:
        raise AssertionError("nothing is in doubt here")


def measure(ranks_count: int) -> RanksFigures:
    """Make a few calls with so many ranks."""
    exchange = MemoryExchange(ranks_count)
    with ThreadPoolExecutor(2 * ranks_count) as threads:
        seconds, cpu_seconds = asyncio.run(_calls(exchange, threads))
    assert exchange.sent_count % CALLS_COUNT == 0, "a rank was so slow that it had to say that it is alive"
    return RanksFigures(
        ranks_count=ranks_count,
        sent_count=exchange.sent_count // CALLS_COUNT,
        sent_bytes=exchange.sent_bytes // CALLS_COUNT,
        received_count=exchange.received_count // CALLS_COUNT,
        received_bytes=exchange.received_bytes // CALLS_COUNT,
        seconds=sorted(seconds)[CALLS_COUNT // 2],
        cpu_ms_per_rank=sorted(cpu_seconds)[CALLS_COUNT // 2] * 1000 / ranks_count,
        coordinator_ms=1000 * min(coordinator_seconds(ranks_count) for _ in range(CALLS_COUNT)),
    )


async def _calls(exchange: MemoryExchange, threads: ThreadPoolExecutor) -> tuple[list[float], list[float]]:
    channels = [exchange.channel(rank) for rank in range(exchange.ranks_count)]
    effects = [NoEffects(channel.rank) for channel in channels]
    seconds, cpu_seconds = [], []
    for call in range(1, CALLS_COUNT + 1):
        begun, cpu_begun = time.perf_counter(), time.process_time()
        outcomes = await asyncio.gather(
            *(run_call(channel, call, BEGIN, effects[channel.rank], LIMITS, threads=threads) for channel in channels)
        )
        seconds.append(time.perf_counter() - begun)
        cpu_seconds.append(time.process_time() - cpu_begun)
        assert {outcome.state for outcome in outcomes} == {"committed"}
    return seconds, cpu_seconds


def coordinator_seconds(ranks_count: int) -> float:
    """What rank 0 computes in a call: take and compare what all say, decide, encode what they are told."""
    attempt = Attempt.new(BEGIN.step)
    begins = [encode(BEGIN) for _ in range(1, ranks_count)]
    prepared = [encode(Prepared(attempt, prepared_notes(rank, attempt))) for rank in range(1, ranks_count)]
    begun = time.perf_counter()
    rank_0 = RankMachine(0, ranks_count, BEGIN, LIMITS, 0.0)
    actions = rank_0.hand_over(rank_0.participant.start(), 0.0)
    for rank, raw in enumerate(begins, start=1):
        actions = rank_0.receive(rank, decode(raw, sender=rank), 0.0)
    assert isinstance(actions[0], MakeFolder)
    started = rank_0.coordinator.folder_made(attempt, ATTEMPT_NOTES)
    encode(rank_0.hand_over(started, 0.0)[0].message)  # type: ignore[union-attr]
    rank_0.hand_over(rank_0.participant.wrote(prepared_notes(0, attempt)), 0.0)
    for rank, raw in enumerate(prepared, start=1):
        rank_0.receive(rank, decode(raw, sender=rank), 0.0)
    ended = rank_0.coordinator.published(Outcome("committed", attempt, notes={"digest": DIGEST}))
    encode(rank_0.hand_over(ended, 0.0)[0].message)  # type: ignore[union-attr]
    assert rank_0.has_ended
    return time.perf_counter() - begun


def show(figures: list[RanksFigures]) -> Table:
    table = Table(title="one call of all ranks, protocol alone")
    columns = ("ranks", "sent", "KiB sent", "received", "KiB received", "seconds", "CPU ms a rank", "rank 0 alone ms")
    for column in columns:
        table.add_column(column, justify="right")
    for one in figures:
        table.add_row(
            f"{one.ranks_count:,}",
            f"{one.sent_count:,}",
            f"{one.sent_bytes / 1024:,.1f}",
            f"{one.received_count:,}",
            f"{one.received_bytes / 1024:,.1f}",
            f"{one.seconds:.3f}",
            f"{one.cpu_ms_per_rank:.2f}",
            f"{one.coordinator_ms:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default=RANKS, help=f"numbers of ranks, comma-separated (default {RANKS})")
    parser.add_argument("--out", type=Path, help="write the figures to <out>.json and <out>.txt too")
    options = parser.parse_args()
    console = make_console()
    figures = [measure(int(ranks)) for ranks in options.ranks.split(",")]
    console.print(show(figures))
    if options.out is not None:
        result = {"machine": machine(), "figures": [asdict(one) for one in figures]}
        Path(f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
        Path(f"{options.out}.txt").write_text(console.export_text())


if __name__ == "__main__":
    main()
