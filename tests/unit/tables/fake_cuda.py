"""What tables call of torch.cuda, without CUDA: one device and its current stream, which notes who waits for whom."""

from __future__ import annotations

import torch


class FakeStream:
    """A torch.cuda.Stream that notes for which others it waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cuda_stream = 0
        self.waits_for: list[str] = []

    def synchronize(self) -> None:
        self.waits_for.append("the host")

    def wait_stream(self, other: FakeStream) -> None:
        self.waits_for.append(other.name)


class FakeCuda:
    def __init__(self) -> None:
        self.current = FakeStream("first")

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == torch.device("cuda", 1)
        return self.current
