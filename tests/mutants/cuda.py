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
    ),
    Mutation(
        "cuda-pieces-span-segments",
        5,
        "a copy across two registrations of the arena fails, and with it the transfer",
        "devices/cuda_memory.py",
        "across: npt.NDArray[np.bool_] = begin + copies.size > self._segment_bytes",
        "across: npt.NDArray[np.bool_] = begin > self._segment_bytes",
    ),
)
