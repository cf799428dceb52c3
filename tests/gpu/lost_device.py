"""`python -m tests.gpu.lost_device FOLDER`: a device is lost in the middle of a save; the host's state is still saved.

A process of its own, because a device that is lost stays so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import asyncckpt

WAIT_S = 60


def main(folder: str) -> None:
    path = Path(folder)
    on_device, on_host = torch.arange(4 << 20, dtype=torch.float32, device="cuda"), torch.arange(1000.0)
    tensors = {"device": on_device, "host": on_host}
    saver = asyncckpt.Saver(path=path / "all", tensors=tensors)
    saver.save_async(1).result(WAIT_S)
    # An index out of range fails an assert on the device, when it comes there.
    torch.cuda._sleep(50_000_000)
    on_device[torch.tensor([1 << 30], device="cuda")] = 0
    try:
        saver.save_async(2).result(WAIT_S)
    except asyncckpt.DeviceError as error:
        print("first:", error)
    else:
        raise AssertionError("a save of a lost device did not fail")
    try:
        saver.save_async(3).result(WAIT_S)
    except asyncckpt.DeviceError as error:
        print("second:", error)
    else:
        raise AssertionError("another save of a lost device did not fail")
    saver.close()
    with asyncckpt.Saver(path=path / "host", tensors={"host": on_host}) as other:
        other.save_async(1).result(WAIT_S)
        other.save(2)
    found = {"device": torch.zeros(4 << 20), "host": torch.zeros(1000)}
    report = asyncckpt.Loader(path / "all", tensors=found).load()
    assert report.step == 1
    assert torch.equal(found["device"], torch.arange(4 << 20, dtype=torch.float32))
    assert torch.equal(found["host"], on_host)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
