"""GPU memory of our own, for benchmarks and tests: what engines allocate in other ways."""

from __future__ import annotations

from ctypes import byref, c_size_t, c_ubyte, c_uint64, c_void_p

from lamina.devices.cuda_driver import call
from lamina.devices.cuda_launch import allocate, free

__all__ = ["allocate", "fill", "free", "memory_info", "read", "write"]


def memory_info() -> tuple[int, int]:
    """Free and total bytes of the current GPU."""
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value, total.value


def fill(pointer: int, byte: int, nbytes: int) -> None:
    """Set device memory to one byte."""
    call("cuMemsetD8_v2", c_uint64(pointer), c_ubyte(byte), c_size_t(nbytes))


def write(pointer: int, source: int, nbytes: int) -> None:
    """Copy host memory to device memory and wait."""
    call("cuMemcpyHtoD_v2", c_uint64(pointer), c_void_p(source), c_size_t(nbytes))


def read(target: int, pointer: int, nbytes: int) -> None:
    """Copy device memory to host memory and wait."""
    call("cuMemcpyDtoH_v2", c_void_p(target), c_uint64(pointer), c_size_t(nbytes))
