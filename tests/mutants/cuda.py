"""Mutations of the CUDA device; its tests run on a driver that is no GPU's."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

CUDA = (
    Mutation(
        "cuda-region-beyond-allocation",
        5,
        "a worker that claims more than it exported has others' memory copied",
        "devices/cuda_memory.py",
        "if begin + region.nbytes > driver.address_range(base)[1]:",
        "if region.nbytes > driver.address_range(base)[1]:",
        ("tests/devices/test_cuda_memory.py",),
    ),
    Mutation(
        "cuda-pieces-span-segments",
        5,
        "a copy across two registrations of the arena fails, and with it the transfer",
        "devices/cuda_memory.py",
        "across: npt.NDArray[np.bool_] = begin + copies.size > self._segment_bytes",
        "across: npt.NDArray[np.bool_] = begin > self._segment_bytes",
        ("tests/devices/test_cuda_memory.py",),
    ),
    Mutation(
        "cuda-second-stream-unwaited",
        2,
        "a slice is announced before the half of it that the second stream copies has landed",
        "devices/cuda_stream.py",
        "        driver.wait_event(stream, self._event)\n",
        "",
        ("tests/devices/test_cuda_order.py",),
    ),
    Mutation(
        "cuda-unbounded-run-ahead",
        8,
        "a cancelled transfer goes on for as long as it would have taken",
        "devices/cuda_stream.py",
        "while len(self._batches) >= _AHEAD_BATCHES:",
        "while False:",
        ("tests/devices/test_cuda_order.py",),
    ),
    Mutation(
        "cuda-stores-in-any-order",
        7,
        "a store reads pages before what was enqueued before it is done",
        "devices/cuda_driver.py",
        "order = _ORDER_ANY if to_device else _ORDER_STREAM",
        "order = _ORDER_ANY",
        ("tests/devices/test_cuda_driver.py",),
    ),
    Mutation(
        "cuda-detach-unsynchronised",
        1,
        "a ticket that is still enqueued is written to memory that is another's by then",
        "devices/cuda.py",
        "driver.synchronize_context()  # a ticket or",
        "pass  # a ticket or",
        ("tests/devices/test_cuda_order.py",),
    ),
    Mutation(
        "cuda-shared-mapping-closed",
        1,
        "a worker that leaves unmaps an allocation that another one's transfers use",
        "devices/cuda.py",
        "            self._opened[handle] = (pointer, users - 1)\n        else:\n"
        "            driver.close_ipc(pointer)\n",
        "            self._opened[handle] = (pointer, users - 1)\n"
        "        driver.close_ipc(pointer)\n",
        ("tests/devices/test_cuda_order.py",),
    ),
)
