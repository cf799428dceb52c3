"""What every test relies on, however the suite was started."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu import device
from tests.shares import is_drawn
from tests.worlds.gates import gate as gate
from tests.worlds.threads import one_thread as one_thread

TESTS = Path(__file__).parent
# One in so many tests is run, drawn by its name and by the number that tests/shares.py draws by.
TESTS_EVERY = int(os.environ.get("ASYNCCKPT_TESTS_EVERY", "1"))
# The twin runs what goes through the core: copies into arenas, writes and reads of files, id maps, marks and prints.
# Which core runs makes no difference to what these show, or they run both themselves. Files and folders.
ANY_CORE = (
    "adapters",
    "bad_input/test_arbitrary_bytes.py",
    "bad_input/test_case_table.py",
    "bad_input/test_chains.py",
    "bad_input/test_load_targets.py",
    "bad_input/test_manifest.py",
    "bad_input/test_manifest_contents.py",
    "bad_input/test_moved_directories.py",
    "bad_input/test_paths.py",
    "bad_input/test_permissions.py",
    "bad_input/test_ranks.py",
    "bad_input/test_saver_states.py",
    "bad_input/test_saver_tensors.py",
    "bad_input/test_values_and_names.py",
    "bench",
    "cloud",
    "core_programs",
    "dcp/test_stager.py",
    "dcp/test_staging_programs.py",
    "demo",
    "docs",
    "embcache",
    "end_to_end/test_asyncio.py",
    "end_to_end/test_changed_models.py",
    "end_to_end/test_checkpointer.py",
    "end_to_end/test_checkpointer_arguments.py",
    "end_to_end/test_directory_lock.py",
    "end_to_end/test_doubt.py",
    "end_to_end/test_endings.py",
    "end_to_end/test_error_once.py",
    "end_to_end/test_failed_restore.py",
    "end_to_end/test_first_save.py",
    "end_to_end/test_follow.py",
    "end_to_end/test_follow_process.py",
    "end_to_end/test_future.py",
    "end_to_end/test_going_back.py",
    "end_to_end/test_handover.py",
    "end_to_end/test_kept.py",
    "end_to_end/test_last_steps.py",
    "end_to_end/test_modules_of_their_own_ways.py",
    "end_to_end/test_on_busy.py",
    "end_to_end/test_optimizer_states.py",
    "end_to_end/test_periodic.py",
    "end_to_end/test_ranks_load.py",
    "end_to_end/test_refused_loads.py",
    "end_to_end/test_retention_behind.py",
    "end_to_end/test_two_savers.py",
    "end_to_end/test_write_filter.py",
    "experimental",
    "interrupts",
    "observed",
    "pairs",
    "process_defaults",
    "reshard",
    "strategies",
    "test_floors.py",
    "test_places.py",
    "test_waits.py",
    "testing/test_documented_suite.py",
    "testing/test_embedding_suite.py",
    "testing/test_tiny_marks.py",
    "testing/test_tiny_tables.py",
    "unit/cli",
    "unit/commit",
    "unit/engine",
    "unit/format",
    "unit/model",
    "unit/native",
    "unit/pipeline/test_filter_rules.py",
    "unit/plan/test_regions.py",
    "unit/tables/test_gradients.py",
    "unit/tables/test_initializer.py",
    "unit/tables/test_stored_table_expiry.py",
    "unit/tables/test_table_arguments_ids.py",
)


FIXED_SEED = 0
RANDOM_RUNS_FACTOR = 4

# A run of the suite shows the same each time, wherever it is. `make test-random` draws other examples: it chooses the
# other profile and prints its seed. The environments for GPUs and TorchRec have no hypothesis.
if find_spec("hypothesis") is not None:
    import hypothesis

    hypothesis.settings.register_profile("fixed", derandomize=True, database=None)
    hypothesis.settings.register_profile("random", derandomize=False, database=None, print_blob=True)
    hypothesis.settings.load_profile("fixed")


@pytest.fixture
def base_seed(pytestconfig: pytest.Config) -> int:
    """Where the seeds of lanes begin that share the examples of one property."""
    chosen = pytestconfig.getoption("hypothesis_seed", None)
    return FIXED_SEED if chosen is None else int(chosen)


@pytest.fixture
def runs_factor(pytestconfig: pytest.Config) -> int:
    """How many times as many examples as usual a property takes that is made of long runs."""
    return 1 if pytestconfig.getoption("hypothesis_seed", None) is None else RANDOM_RUNS_FACTOR


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws does not depend on those before it."""
    random.seed(FIXED_SEED)
    np.random.seed(FIXED_SEED)
    torch.default_generator.manual_seed(FIXED_SEED)  # That of the host alone: a device may be in use.


def left_out(config: pytest.Config) -> dict[Path, str]:
    """Folders that need what is not here, and why: those above which the run was started, not those it names itself."""
    reasons = {
        TESTS / "gpu": device.why_none(),
        TESTS / "integrations": "" if find_spec("transformers") else "no transformers here: make test-integrations",
        TESTS / "lowbit": "" if find_spec("torchao") else "no torchao here: make test-lowbit",
        TESTS / "torchrec": "" if find_spec("torchrec") else "no torchrec here: make test-torchrec",
    }
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return {
        folder: reason
        for folder, reason in reasons.items()
        if reason and any(folder != path and folder.is_relative_to(path) for path in named)
    }


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path in left_out(config) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for folder, reason in left_out(config).items():
        terminalreporter.write_line(f"tests/{folder.name} is not collected: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs no second run on the twin, and what draws examples; leave out what this run does not take."""
    items[:] = [item for item in items if is_drawn(item.nodeid, TESTS_EVERY)]
    for item in items:
        # Hypothesis has not marked them yet.
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.random)
        path = item.path.relative_to(TESTS)
        if any(path.is_relative_to(name) for name in ANY_CORE):
            item.add_marker(pytest.mark.any_core)


@pytest.fixture(scope="session", autouse=True)
def forbid_own_waits() -> None:
    """Here, for what is collected may set the environment."""
    from tests.own_waits import watch

    watch()


@pytest.fixture(scope="session", autouse=True)
def refused_loads_change_nothing() -> Iterator[None]:
    """Every load of the suite that is refused leaves its targets as they were."""
    from tests.untouched import looked_at

    with looked_at():
        yield


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Standard error once it holds a text: what ended may be let go, and printed, by the thread that ended it."""

    def wait_for(text: str) -> str:
        found, limit = "", time.monotonic() + 30.0
        while text not in found and time.monotonic() < limit:
            gc.collect()
            found += capsys.readouterr().err
            time.sleep(0.001)
        return found

    return wait_for


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a failed test held on a simulated device may be shown."""
    memory = sys.modules.get("tests.simulated_device.memory")
    if call.excinfo is not None and memory is not None:
        memory.open_all_for_good()
    return (yield)


# A shell without job control starts background commands with SIGINT ignored, and children inherit that; the tests of
# interrupts need Python's own handler. Children get the default again, for an exec resets what is handled.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
