"""A simulated kind of devices: what CUDA promises about order, and nothing more, on a machine without one.

ranges.py        ranges of memory: what devices and their copy engines reach of them
memory.py        memory of a device: out of bounds for the host except while a queued operation runs
schedule.py      streams, events, and the seeded order in which queued operations run
torch_queue.py   torch's own operations on tensors of devices are queued instead of done
library.py       the CUDA library's copies are queued, over the library that was compiled for the CPU
runtime.py       SimulatedRuntime, which puts it all together: implements devices.contract.Runtime
torch_cuda.py    torch.cuda in small, for CudaRuntime alone: contexts, streams out of pools, captures of graphs

runtime = SimulatedRuntime(seed=1)
with runtime.installed():
    tensor = runtime.new_tensor((4, 4), torch.float32)
    saver.save_async()
    tensor.add_(1)  # Is queued on the current stream.
"""

from tests.simulated_device.runtime import SimulatedRuntime
from tests.simulated_device.schedule import SimulationFault

__all__ = ["SimulatedRuntime", "SimulationFault"]
