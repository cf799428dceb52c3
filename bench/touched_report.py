"""The tables and targets of `python -m bench touched`.

Answers are what the processes of all rounds measured, one per way of saving and round: see touched.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from bench.figures import NAN, median_of
from bench.report import number, print_table, times
from bench.targets import Target, print_targets

REFRESH_SHARE = 0.01
STALL_FLOOR_PARTS, STALL_SECONDS = 20, 0.002
DELTA_BYTES_MAX, MARKING_MAX, ZIPF_TIMES_LESS = 1.1, 0.01, 6.0
ORDER = ("refresh", "copy", "delta", "raw_floor")


def print_touched(console: Console, content: dict[str, Any], title: str) -> None:
    """Everything that people look at."""
    answers = content["rounds"]
    columns = ["way", "rows written", "stall ms", "of the floor's", "time lost ms", "durable s", "of the floor's"]
    print_table(console, title, [*columns, "MB written", "of written rows"], _rows(answers))
    for words in _spoken(content):
        console.print(words, highlight=False)
    print_targets(console, _targets(content))


def _saves(answers: Sequence[dict[str, Any]], way: str, share: float) -> dict[int, list[dict[str, Any]]]:
    """By round."""
    return {a["round"]: [s for s in a["saves"] if s["share"] == share] for a in answers if a["way"] == way}


def _median(answers: Sequence[dict[str, Any]], way: str, share: float, name: str) -> float:
    saves = [save for some in _saves(answers, way, share).values() for save in some]
    return median_of(float(save["save"].get(name, save.get(name, NAN))) for save in saves)


def _ratio(answers: Sequence[dict[str, Any]], way: str, share: float, name: str) -> float:
    """Median over rounds of ours / floor's in the same round."""
    floors = _saves(answers, "raw_floor", share)
    ratios = []
    for number_of, saves in _saves(answers, way, share).items():
        floor = median_of(save["save"][name] for save in floors.get(number_of, []))
        ratios.append(median_of(save["save"][name] for save in saves) / floor)
    return median_of(ratios)


def _delta_share(answers: Sequence[dict[str, Any]], way: str, share: float) -> float:
    """Bytes written per byte of rows written (and of dense tensors, which are always written)."""
    saves = [save for some in _saves(answers, way, share).values() for save in some]
    return median_of(save["bytes_written"] / save["touched_bytes"] for save in saves)


def _rows(answers: Sequence[dict[str, Any]]) -> list[list[str]]:
    ways = list(dict.fromkeys(sorted((answer["way"] for answer in answers), key=ORDER.index)))
    shares = sorted({save["share"] for answer in answers for save in answer["saves"]})
    return [
        [
            way,
            f"{share:.1%}",
            number(_median(answers, way, share, "stall_seconds") * 1e3, 2),
            times(_ratio(answers, way, share, "stall_seconds")),
            number(_median(answers, way, share, "lost_seconds") * 1e3, 1),
            number(_median(answers, way, share, "durable_seconds")),
            times(_ratio(answers, way, share, "durable_seconds")),
            number(_median(answers, way, share, "bytes_written") / 1e6, 1),
            times(_delta_share(answers, way, share)),
        ]
        for share in shares
        for way in ways
    ]


def _spoken(content: dict[str, Any]) -> list[str]:
    marking = content["marking"]
    lines = [f"marking: {marking['marking_seconds'] * 1e6:.0f} us of a step of {marking['step_seconds'] * 1e3:.2f} ms"]
    zipf = content.get("zipf")
    if zipf is not None:
        saves, written = len(zipf["bytes"]), zipf["bytes"]
        lines += [
            f"Zipf training, {saves} saves, one every {zipf['steps_per_save']} steps: "
            f"{sum(written) / 1e6:.0f} MB, full saves {zipf['full_bytes'] * saves / 1e6:.0f} MB; "
            f"with the default policy {zipf['default_policy_bytes'] / 1e6:.0f} MB",
            "MB of each save: " + ", ".join(f"{one / 1e6:.0f}" for one in written),
        ]
    return lines


def _targets(content: dict[str, Any]) -> list[Target]:
    answers = content["rounds"]
    stall = _median(answers, "refresh", REFRESH_SHARE, "stall_seconds")
    floor = _median(answers, "raw_floor", REFRESH_SHARE, "stall_seconds")
    bound_ms = max(floor / STALL_FLOOR_PARTS, STALL_SECONDS) * 1e3
    targets = [
        Target("1 % written: stall of a full save, ms", stall * 1e3, round(bound_ms, 2)),
        Target(
            "1 % written: bytes of a delta / of the rows",
            _delta_share(answers, "delta", REFRESH_SHARE),
            DELTA_BYTES_MAX,
        ),
        Target("marking / step time", content["marking"]["share"], MARKING_MAX),
    ]
    zipf = content.get("zipf")
    if zipf is not None:
        less = zipf["full_bytes"] * len(zipf["bytes"]) / sum(zipf["bytes"])
        targets.append(Target("Zipf training: times less bytes than full saves", less, ZIPF_TIMES_LESS, at_least=True))
    return targets
