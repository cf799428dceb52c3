"""Training steps in CUDA graphs: saves go between replays, and are refused inside a capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.gpu.device import DEVICE, keep_busy
from tests.gpu.state import CountingState, assert_holds, differences

pytestmark = pytest.mark.cuda_only
WAIT_S = 120


def captured(state: CountingState) -> torch.cuda.CUDAGraph:
    """A graph of one `advance`, as torch's documentation makes one: warmed up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        state.advance()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in state.live.values():
            tensor.add_(1)
    return graph


@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_saves_between_replays_are_exact(tmp_path: Path, scratch: int) -> None:
    state, steps = CountingState(1), {}
    graph = captured(state)
    with asyncckpt.Saver(
        path=tmp_path,
        tensors=state.tensors,
        device=asyncckpt.DeviceOptions(scratch_bytes=scratch),
        on_busy="queue",
        durability="none",
    ) as saver:
        futures = []
        for step in range(4):
            keep_busy()
            graph.replay()
            state.steps += 1
            steps[step] = state.steps
            futures.append(saver.save_async(step))
            graph.replay()
            state.steps += 1
        for future in futures:
            future.result(WAIT_S)
    for step, count in steps.items():
        assert_holds(tmp_path, state.expected(count), step=step)


def test_a_save_inside_a_capture_is_refused(tmp_path: Path) -> None:
    """Nothing of it gets into the graph, which goes on."""
    state = CountingState(2)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        saver.save_async(1).result(WAIT_S)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state.live["large"].add_(1)
            with pytest.raises(asyncckpt.UsageError):
                saver.save_async(2)
        graph.replay()
        assert torch.equal(state.live["large"].cpu(), state.expected(1)["large"])
        saver.save_async(3).result(WAIT_S)
    expected = {**state.expected(0), "large": state.expected(1)["large"]}
    assert_holds(tmp_path, expected, step=3)
    assert asyncckpt.list_steps(tmp_path) == [1, 3]


def test_a_save_in_the_background_does_not_disturb_a_capture(tmp_path: Path) -> None:
    """As for other work of other threads, a capture has to allow it: capture_error_mode="thread_local"."""
    state, other = CountingState(3), torch.zeros(1000, device=DEVICE)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        saver.save_async(0).result(WAIT_S)
        keep_busy()
        future = saver.save_async(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            other.add_(1)
        future.result(WAIT_S)
        graph.replay()
        torch.cuda.synchronize()
    assert other.eq(1).all()
    assert_holds(tmp_path, state.expected(), step=1)


def test_a_load_between_replays(tmp_path: Path) -> None:
    """Targets keep their addresses, so the graph goes on with what was loaded."""
    state = CountingState(4)
    graph = captured(state)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        saver.save_async(1).result(WAIT_S)
    graph.replay()
    asyncckpt.Loader(tmp_path, tensors=state.live).load()
    graph.replay()
    torch.cuda.synchronize()
    assert differences(state.tensors, state.expected(2)) == []
