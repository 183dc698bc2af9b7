"""The CUDA driver calls that Lamina uses, checked and typed.

Through `ctypes` rather than a binding package: the batch copy needs NumPy arrays as arguments (a
binding that takes Python lists is too slow at 30,000 pieces), every call frees the GIL, the
driver's ABI is stable, and neither the server nor the engine gets another dependency to agree on.
Handles and device pointers are plain integers.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from lamina.errors import DeviceError

IPC_HANDLE_BYTES = 64
_SUCCESS, _NOT_READY = 0, 600
_HOST_REGISTER_PORTABLE, _HOST_REGISTER_DEVICEMAP = 1, 2
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING = 1, 2
_WAIT_GEQ = 0  # cyclic: (int32)(*address - value) >= 0
_WRITE_WITH_BARRIER = 0  # everything before it on the stream is visible system-wide first
_ORDER_STREAM, _ORDER_ANY = 1, 3  # CUmemcpySrcAccessOrder

_handle, _pointer = c_void_p, c_uint64
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (c_char_p, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_handle), c_int),
    "cuCtxSetCurrent": (_handle,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuMemGetAddressRange_v2": (POINTER(_pointer), POINTER(c_size_t), _pointer),
    "cuIpcGetMemHandle": (c_void_p, _pointer),
    "cuIpcCloseMemHandle": (_pointer,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(_pointer), c_void_p, c_uint),
    "cuStreamCreate": (POINTER(_handle), c_uint),
    "cuCtxSynchronize": (),
    "cuStreamSynchronize": (_handle,),
    "cuStreamWaitEvent": (_handle, _handle, c_uint),
    "cuStreamWriteValue32_v2": (_handle, _pointer, c_uint, c_uint),
    "cuStreamWaitValue32_v2": (_handle, _pointer, c_uint, c_uint),
    "cuEventCreate": (POINTER(_handle), c_uint),
    "cuEventRecord": (_handle, _handle),
    "cuEventQuery": (_handle,),
    "cuEventSynchronize": (_handle,),
    "cuEventDestroy_v2": (_handle,),
    "cuMemcpyHtoDAsync_v2": (_pointer, c_void_p, c_size_t, _handle),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _pointer, c_size_t, _handle),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuStreamCreateWithPriority": (POINTER(_handle), c_uint, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuModuleLoadData": (POINTER(_handle), c_char_p),
    "cuModuleGetFunction": (POINTER(_handle), _handle, c_char_p),
    "cuMemAlloc_v2": (POINTER(_pointer), c_size_t),
    "cuMemFree_v2": (_pointer,),
    "cuLaunchKernelEx": (c_void_p, _handle, c_void_p, c_void_p),
    "cuStreamBatchMemOp_v2": (_handle, c_uint, c_void_p, c_uint),
}


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", c_uint),
    )


@cache
def _driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError("there is no CUDA driver", "Install the NVIDIA driver") from error
    for name, arguments in _PROTOTYPES.items():
        getattr(library, name).argtypes = arguments
    library.cuIpcOpenMemHandle_v2.argtypes = (POINTER(_pointer), _IpcHandle, c_uint)
    return library


def check(code: int, what: str) -> None:
    """Raise `DeviceError` unless a call of the driver has succeeded."""
    if code != _SUCCESS:
        text = c_char_p()
        _driver().cuGetErrorString(code, byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise DeviceError(f"{what} failed: {reason} (CUDA error {code})", "See the driver's log")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver by its name. Raises `DeviceError` unless it succeeds."""
    check(getattr(_driver(), name)(*arguments), name)


def function(name: str) -> Any:
    """A function of the driver, for calls that must be cheap: the caller checks what it returns."""
    return getattr(_driver(), name)


def device_uuids() -> list[str]:
    """The UUIDs of the visible GPUs, in order; raises `DeviceError` when there is no driver."""
    call("cuInit", 0)
    count = c_int()
    call("cuDeviceGetCount", byref(count))
    return [_uuid(index) for index in range(count.value)]


def _uuid(device: int) -> str:
    text = ctypes.create_string_buffer(16)
    call("cuDeviceGetUuid_v2", text, device)
    return text.raw.hex()


def pci_bus_id(device: int) -> str:
    """Where a GPU sits, as sysfs spells it."""
    text = ctypes.create_string_buffer(32)
    call("cuDeviceGetPCIBusId", text, len(text), device)
    return text.value.decode().lower()


def current_device() -> int:
    """The GPU whose context is current on this thread."""
    device = c_int()
    call("cuCtxGetDevice", byref(device))
    return device.value


def current_device_uuid() -> str:
    """The UUID of the GPU whose context is current on this thread."""
    return _uuid(current_device())


def retain_primary_context(device: int) -> int:
    """The primary context of a GPU, made if need be; it stays until the process ends."""
    call("cuInit", 0)
    context = c_void_p()
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    return int(context.value or 0)


def set_context(context: int) -> None:
    """Make a context current on this thread."""
    call("cuCtxSetCurrent", context)


def address_range(pointer: int) -> tuple[int, int]:
    """Start and size of the allocation that holds `pointer`."""
    base, size = c_uint64(), c_size_t()
    call("cuMemGetAddressRange_v2", byref(base), byref(size), pointer)
    return base.value, size.value


def ipc_handle(base: int) -> bytes:
    """A handle by which another process can open the allocation at `base`."""
    handle = _IpcHandle()
    call("cuIpcGetMemHandle", byref(handle), base)
    return bytes(handle)


def open_ipc(handle: bytes) -> int:
    """Map another process's allocation. One process can open a handle once at a time."""
    pointer = c_uint64()
    opened = _IpcHandle.from_buffer_copy(handle)
    call("cuIpcOpenMemHandle_v2", byref(pointer), opened, _IPC_LAZY_ENABLE_PEER_ACCESS)
    return pointer.value


def close_ipc(pointer: int) -> None:
    call("cuIpcCloseMemHandle", pointer)


def pin(address: int, nbytes: int) -> None:
    """Pin host memory for all contexts and map it for the GPU."""
    flags = _HOST_REGISTER_PORTABLE | _HOST_REGISTER_DEVICEMAP
    call("cuMemHostRegister_v2", address, nbytes, flags)


def unpin(address: int) -> None:
    call("cuMemHostUnregister", address)


def device_pointer(address: int) -> int:
    """Where the GPU sees pinned host memory."""
    pointer = c_uint64()
    call("cuMemHostGetDevicePointer_v2", byref(pointer), address, 0)
    return pointer.value


def create_stream() -> int:
    """A stream that does not wait for the default stream."""
    stream = c_void_p()
    call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
    return int(stream.value or 0)


def synchronize(stream: int) -> None:
    call("cuStreamSynchronize", stream)


def synchronize_context() -> None:
    """Wait for everything enqueued on any stream of the current context."""
    call("cuCtxSynchronize")


def write_value(stream: int, pointer: int, value: int) -> None:
    """Enqueue a 32-bit store that follows everything before it, visible to the whole system."""
    call("cuStreamWriteValue32_v2", stream, pointer, value, _WRITE_WITH_BARRIER)


def wait_value(stream: int, pointer: int, value: int) -> None:
    """Enqueue a wait until the word reaches `value`, cyclically. Any CPU store can end it."""
    call("cuStreamWaitValue32_v2", stream, pointer, value, _WAIT_GEQ)


def create_event() -> int:
    """An event without a time, whose waiters sleep."""
    event = c_void_p()
    call("cuEventCreate", byref(event), _EVENT_DISABLE_TIMING | _EVENT_BLOCKING_SYNC)
    return int(event.value or 0)


def destroy_event(event: int) -> None:
    """Give an event back; what waits for it still does."""
    call("cuEventDestroy_v2", event)


def record(event: int, stream: int) -> None:
    call("cuEventRecord", event, stream)


def wait_event(stream: int, event: int) -> None:
    """Make what is enqueued on `stream` from now on follow the event's last record."""
    call("cuStreamWaitEvent", stream, event, 0)


def is_recorded(event: int) -> bool:
    """Whether everything before the event's record is done."""
    code = _driver().cuEventQuery(event)
    if code == _NOT_READY:
        return False
    check(code, "cuEventQuery")
    return True


def wait_recorded(event: int) -> None:
    """Sleep until everything before the event's record is done."""
    call("cuEventSynchronize", event)


def copy_one(target: int, source: int, nbytes: int, stream: int, *, to_device: bool) -> None:
    """Enqueue one copy between host and device memory; either may be pageable."""
    name = "cuMemcpyHtoDAsync_v2" if to_device else "cuMemcpyDtoHAsync_v2"
    call(name, target, source, nbytes, stream)


@cache
def has_batch_copy() -> bool:
    """Whether the driver has `cuMemcpyBatchAsync` (12.8 and later)."""
    return any(hasattr(_driver(), name) for name in _BATCH_CALLS)


_BATCH_CALLS = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")


def copy_batch(
    targets: int, sources: int, sizes: int, count: int, stream: int, *, to_device: bool
) -> None:
    """Enqueue `count` copies; the three are addresses of arrays of 64-bit integers.

    Stable pinned memory may be read in any order; device memory must be read in stream order.
    """
    order = _ORDER_ANY if to_device else _ORDER_STREAM
    attributes = _CopyAttributes(order)
    first = c_size_t(0)
    driver = _driver()
    arguments = (c_void_p(targets), c_void_p(sources), c_void_p(sizes), c_size_t(count))
    applied = (byref(attributes), byref(first), c_size_t(1))
    if hasattr(driver, _BATCH_CALLS[0]):
        code = driver.cuMemcpyBatchAsync_v2(*arguments, *applied, c_void_p(stream))
    else:
        failed = c_size_t()  # CUDA 12.8's call says which piece failed; 13's does not
        code = driver.cuMemcpyBatchAsync(*arguments, *applied, byref(failed), c_void_p(stream))
    check(code, "cuMemcpyBatchAsync")
