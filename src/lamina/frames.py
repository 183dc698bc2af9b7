"""Frames as they come from a socket, in any pieces. What they are and hold is in `protocol`."""

from __future__ import annotations

from lamina.protocol import FRAME_HEADER_BYTES, MAX_FRAME_BYTES, MalformedError


class FrameBuffer:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Take in bytes as they came."""
        self._data += data

    def take(self) -> bytes | None:
        """The next complete body, or None. Raises `MalformedError` when a giant frame is next."""
        if len(self._data) < FRAME_HEADER_BYTES:
            return None
        length = int.from_bytes(self._data[:FRAME_HEADER_BYTES], "little")
        if length > MAX_FRAME_BYTES:
            raise MalformedError(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are allowed")
        end = FRAME_HEADER_BYTES + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[FRAME_HEADER_BYTES:end])
        del self._data[:end]
        return body

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the bodies now complete. Raises `MalformedError` on a giant frame."""
        self.add(data)
        return list(iter(self.take, None))
