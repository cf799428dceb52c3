"""What a save of a multi-level table brings out is the table of one step, whatever training does meanwhile.

600 random runs on the compiled core, fewer on the twin, which tests the same Python; the same each time, but with `make
test-random`. Each trains a multi-level table beside a plain one (multi_level_runs.py), with any size of cache, either
policy, prefetches up to three steps ahead, ids that appear in a forward, removals, evictions by age, growth, a log of
old values of a few rows only, and saves at random boundaries while exports of earlier ones are still on their way.

That these runs can fail was shown by taking the first touch away: the test at the end does it every time. Without old
values being kept, rows that are written back, removed or given to other ids before their window leaves come out with
values of a later step, and a removed id's row comes out under the id that has got it since.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from asyncckpt.native import implementation
from asyncckpt.tables.undo_log import UndoLog
from tests.end_to_end.multi_level_runs import RunSpec, run

pytestmark = pytest.mark.usefixtures("one_thread")

LANES = 12  # So that processes can share the runs.
RUNS_PER_LANE = 50 if implementation == "native" else 20


specs = st.builds(
    RunSpec,
    seed=st.integers(0, 2**31),
    cache_rows=st.integers(1, 300),
    policy=st.sampled_from(["lru", "lfu"]),
    prefetch_depth=st.integers(0, 3),
    host_level=st.sampled_from(["first_touch", "first_touch", "first_touch", "copy"]),
    undo_bytes_max=st.sampled_from([200, 2_000, 1 << 20]),
)


@pytest.mark.random
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:cache of table")
@pytest.mark.parametrize("lane", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, LANES))])
def test_a_save_is_the_cut(lane: int, base_seed: int, runs_factor: int) -> None:
    @seed(base_seed + lane)
    @settings(
        deadline=None,
        max_examples=runs_factor * RUNS_PER_LANE,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
    )
    @given(spec=specs)
    def check(spec: RunSpec) -> None:
        with tempfile.TemporaryDirectory() as folder:
            assert run(spec, Path(folder)) == []

    check()


@pytest.mark.filterwarnings("ignore:cache of table")
def test_without_first_touch_it_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(UndoLog, "rows_change", lambda self, rows, columns: None)
    wrong = []
    for number in range(12):
        spec = RunSpec(seed=number, cache_rows=20, policy="lru", prefetch_depth=2, host_level="first_touch")
        wrong += run(spec, tmp_path / str(number))
    print(f"{len(wrong)} differences, for example {wrong[:3]}")
    assert wrong
