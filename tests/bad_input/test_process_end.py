"""Cases 106 to 109 and 114: the interpreter ends, is interrupted or forks while a save is in flight.

Each test runs a script in a process of its own. Whatever happens, the directory loads afterwards and can be saved to.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from child_script import run_script

import asyncckpt
from tests.shares import share_of

# A filter that lets the save go on when the main thread is past its end and has said what it waits for.
WAIT_FOR_EXIT = """
class Heard:
    def __init__(self, real):
        self.real, self.said = real, threading.Event()
    def write(self, text):
        if "the interpreter ends after" in text:
            self.said.set()
        return self.real.write(text)
    def __getattr__(self, name):
        return getattr(self.real, name)

sys.stderr = heard = Heard(sys.stderr)

def at_exit(blocks):
    threading.main_thread().join(60)
    assert heard.said.wait(60)
    return blocks
"""


def saved_and_usable(root: Path, steps: list[int], told: str = "") -> None:
    """Exactly these steps are there and sound, and the next save works. told: what the process had to say."""
    assert asyncckpt.list_steps(root) == steps, told
    for step in steps:
        asyncckpt.verify(root, step)
    target = {"x": torch.zeros(5)}
    if steps:
        asyncckpt.Loader(root, tensors=target).load()
        assert torch.equal(target["x"], torch.arange(5.0))
    with asyncckpt.Saver(path=root, tensors=target) as saver:
        saver.save()
    assert [path for path in (root / "data").iterdir() if not path.name.startswith("0000")] == []
    assert len(list((root / "data").iterdir())) == len(steps) + 1, "leftovers are swept"


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(3)", 3), ("del saver; gc.collect()", 0)],
)
def test_case_106_107_exit_waits_for_the_save_and_says_so(tmp_path: Path, end: str, code: int) -> None:
    script = f"""
{WAIT_FOR_EXIT}
saver = asyncckpt.Saver(path=root, tensors=STATE, filter_func=at_exit)
saver.save_async(0)
{end}
"""
    run = run_script(script, tmp_path)
    assert run.returncode == code, run.stderr
    assert f"asyncckpt: the interpreter ends after the save of step 0 in {str(tmp_path)!r}" in run.stderr
    saved_and_usable(tmp_path, [0])


def test_case_106_exit_that_waits_for_another_commit_names_no_save(tmp_path: Path) -> None:
    """As that of a compaction, which holds no save lock."""
    script = """
from asyncckpt.engine.process.background import Job, background

async def commit():
    while threading.main_thread().is_alive():
        await asyncio.sleep(0.01)
    print("committed")

background.submit(Job(run=commit, fail=print, beside=True))
"""
    run = run_script(script, tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "committed\n", "")


def test_case_106_error_nobody_asked_for_is_printed_at_exit(tmp_path: Path) -> None:
    script = f"""
{WAIT_FOR_EXIT}
def failing(blocks):
    at_exit(blocks)
    raise ValueError("my reason")

saver = asyncckpt.Saver(path=root, tensors=STATE, filter_func=failing)
saver.save_async(0)
"""
    run = run_script(script, tmp_path)
    assert run.returncode == 0, run.stderr
    assert "failed and nobody asked" in run.stderr
    assert "save of step 0" in run.stderr
    assert "ValueError: my reason" in run.stderr
    saved_and_usable(tmp_path, [])


# How a process uses what fails, and how often the error is printed at its end.
USES = {
    "saver.save_async(0)": 1,
    "saver.save_async(0).exception()": 0,
    "future = saver.save_async(0); os.fork() and os.wait()": 1,
    "saver.save_async(0); saver.save_async(1, on_busy='queue').exception()": 1,
    "asyncio.run(too_short(asyncio.create_task, saver.save_async(0)))": 1,
    "loader.load_async()": 1,
    "saver.save_async(0).cancel()": 0,
    "with contextlib.suppress(FilterError), saver: saver.save_async(0)": 0,
    "with saver: saver.save_async(0); sys.exit()": 1,
    "asyncio.run(in_cancelled_block())": 1,
}


def test_an_error_is_printed_once_if_nobody_got_it(tmp_path: Path) -> None:
    uses = share_of(USES, "uses")
    script = f"""
import contextlib
from asyncckpt.errors import FilterError

may_fail = threading.Event()

def failing(blocks):
    may_fail.wait(0.2)
    raise ValueError("my reason")

async def too_short(make, *arguments):
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(make(*arguments), 0.01)

async def in_cancelled_block():
    async def block():
        async with saver:
            saver.save_async(0)
            await asyncio.sleep(60)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(block(), 0.01)

# Each in a process of its own, which ends as any other one.
for number, use in enumerate({uses!r}):
    if os.fork() == 0:
        os.dup2(os.open(os.path.join(root, f"said-{{number}}"), os.O_WRONLY | os.O_CREAT), 2)
        saver = asyncckpt.Saver(path=os.path.join(root, f"run-{{number}}"), tensors=STATE, filter_func=failing)
        loader = asyncckpt.Loader(os.path.join(root, "nowhere"), tensors=STATE)
        exec(use)
        break
    assert os.wait()[1] == 0, use
"""
    run = run_script(script, tmp_path)
    assert run.returncode == 0, run.stderr
    said = [(tmp_path / f"said-{number}").read_text() for number in range(len(uses))]
    printed = [text.count("nobody asked") + text.count("closing the Saver raised") for text in said]
    assert dict(zip(uses, printed, strict=True)) == {use: USES[use] for use in uses}, said
    assert [text for text in said if "Traceback" in text] == []


@pytest.mark.parametrize(("end", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), signal.SIGTERM)", -15)])
def test_case_107_a_process_that_just_stops_loses_that_save_only(tmp_path: Path, end: str, code: int) -> None:
    script = f"""
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "no handler is installed unasked"
forever = threading.Event()
calls = []

def stuck(blocks):
    calls.append(1)
    if len(calls) == 2:
        written.set()
        forever.wait(60)
    return blocks

written = threading.Event()
saver = asyncckpt.Saver(path=root, tensors=STATE, filter_func=stuck)
saver.save_async(0).result()
saver.save_async(1)
assert written.wait(60)
os.makedirs(os.path.join(root, "data", "000000000001-" + "a" * 32))  # As far as a save may have come.
open(os.path.join(root, "manifests", ".m-" + "a" * 32), "w").close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
{end}
"""
    run = run_script(script, tmp_path)
    assert run.returncode == code, run.stderr
    saved_and_usable(tmp_path, [0])
    assert [path.name for path in (tmp_path / "manifests").iterdir() if path.name.startswith(".m-")] == []


def test_case_107_interrupted_script(tmp_path: Path) -> None:
    """Ctrl-C while the loop waits: Python's own traceback and code, and the save in flight is finished before."""
    script = f"""
{WAIT_FOR_EXIT}
def interrupting(blocks):
    assert waiting.wait(60)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    return at_exit(blocks)

waiting = threading.Event()
saver = asyncckpt.Saver(path=root, tensors=STATE, filter_func=interrupting)
future = saver.save_async(0)
waiting.set()
future.result()
"""
    run = run_script(script, tmp_path)
    assert run.returncode == -signal.SIGINT, run.stderr
    assert "KeyboardInterrupt" in run.stderr
    saved_and_usable(tmp_path, [0], run.stderr)


def test_case_109_fork_during_a_save(tmp_path: Path) -> None:
    script = """
may_end = threading.Event()

def wait(blocks):
    assert may_end.wait(60)
    return blocks

saver = asyncckpt.Saver(path=root, tensors=STATE, filter_func=wait)
future = saver.save_async(0)

def tried(function):
    try:
        return repr(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

read, write = os.pipe()
child = os.fork()
if child == 0:
    answers = {
        "result": tried(future.result),
        "exception": tried(lambda: future.exception(0)),
        "await": tried(lambda: asyncio.run(asyncio.wait_for(future._wait(), 0.1))),
        "save_async": tried(saver.save_async),
        "save": tried(saver.save),
        "prepare": tried(saver.prepare),
        "same directory": tried(lambda: asyncckpt.Saver(path=root)),
        "close": tried(saver.close),
        "wait_idle": tried(lambda: saver.wait_idle(0)),
        "other directory": tried(lambda: asyncckpt.Saver(path=root + "-child", tensors=STATE).save(5).step),
        "load": tried(lambda: asyncckpt.Loader(root + "-child", tensors=STATE).load().step),
    }
    os.write(write, json.dumps(answers).encode())
    sys.exit(0)  # With all that runs at an exit.
os.close(write)
print(os.fdopen(read).read())
pid, status = os.waitpid(child, 0)
assert status == 0, status
may_end.set()
assert future.result().step == 0
saver.save_async(1).result()
saver.close()
"""
    run = run_script(script, tmp_path / "root")
    assert run.returncode == 0, run.stderr
    assert "nobody asked" not in run.stderr
    answers = json.loads(run.stdout)
    for name in ("result", "exception", "await"):
        assert answers[name].startswith("UsageError: save of step 0 belongs to the parent process"), answers
    for name in ("save_async", "save", "prepare"):
        assert answers[name].startswith("UsageError: this Saver belongs to the parent process"), answers
    assert answers["same directory"].startswith("ConflictError"), answers
    assert "is locked by process" in answers["same directory"]
    assert answers["close"] == answers["wait_idle"] == "None"
    assert (answers["other directory"], answers["load"]) == ("5", "5")
    saved_and_usable(tmp_path / "root", [0, 1])


def test_case_109_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """tests/end_to_end/test_directory_lock.py has the same with the workers of a DataLoader."""
    script = """
saver = asyncckpt.Saver(path=root, tensors=STATE)
saver.save(0)
assert is_locked()
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.close(write)
    os.read(read, 1)
    os._exit(0)
saver.close()
assert not is_locked()
assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child is alive"
os.close(write)
os.waitpid(child, 0)
"""
    run = run_script(script, tmp_path)
    assert run.returncode == 0, run.stderr


def test_case_113_no_descriptor_left_for_the_background(tmp_path: Path) -> None:
    """With none, the background's loop cannot be made; with some, a save fails later. The next one works each time."""
    script = """
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []

def take_all():
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass

def give_back(count):
    for _ in range(count):
        os.close(taken.pop())

def background_ends():
    for thread in threading.enumerate():
        if thread.name.startswith("asyncckpt"):
            thread.join(60)

saver = asyncckpt.Saver(path=root, tensors=STATE)
saver.save_async(0).result()
for spare in range(8):
    background_ends()
    take_all()
    give_back(spare)
    try:
        error = saver.save_async(10 + spare).exception(60)
    except asyncckpt.CheckpointError as raised:
        error = raised
    background_ends()
    print(spare, type(error).__name__, error)
    assert error is None or isinstance(error, asyncckpt.IOFailedError) and error.errno == 24, repr(error)
give_back(len(taken))
assert saver.save_async(1).result(60).step == 1
saver.close()
"""
    run = run_script(script, tmp_path)
    assert run.returncode == 0, run.stderr + run.stdout
    assert "Too many open files (raise the limit of open files (ulimit -n))" in run.stdout
    for step in asyncckpt.list_steps(tmp_path):
        asyncckpt.verify(tmp_path, step)


def test_case_114_dropped_saver_gives_its_directory_back(tmp_path: Path) -> None:
    script = """
import weakref

class HeldTensors(dict):
    pass

held = HeldTensors(x=torch.arange(5.0))
alive = weakref.ref(held)
may_end = threading.Event()

def wait(blocks):
    assert may_end.wait(60)
    return blocks

saver = asyncckpt.Saver(path=root, tensors=held, filter_func=wait)
future = saver.save_async(0)
del saver, held
gc.collect()
assert is_locked(), "a save in flight keeps the directory"
may_end.set()
assert future.result(60).step == 0
for thread in threading.enumerate():
    if thread.name.startswith("asyncckpt"):
        thread.join(60)
gc.collect()
assert alive() is None, "the state is let go with the Saver, even while its future is kept"
assert not is_locked()
"""
    run = run_script(script, tmp_path)
    assert run.returncode == 0, run.stderr
    saved_and_usable(tmp_path, [0])
