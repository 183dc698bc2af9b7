"""The error tree. Every error names its cause and what to do about it.

Errors cross the wire as a code with the same two sentences (`protocol.ErrorReply`), so what an
operator reads in the engine's log is what the server meant.
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(str, Enum):
    """Why the server refused a request. Part of the wire protocol: never rename a value."""

    VERSION = "version"
    MALFORMED = "malformed"
    FORBIDDEN = "forbidden"
    NOT_REGISTERED = "not_registered"
    ALREADY_REGISTERED = "already_registered"
    BAD_GEOMETRY = "bad_geometry"
    BAD_BOARD = "bad_board"
    UNKNOWN_LEASE = "unknown_lease"
    BAD_REQUEST = "bad_request"
    COPY_DENIED = "copy_denied"
    STOPPING = "stopping"
    BUSY = "busy"
    INTERNAL = "internal"


class LaminaError(Exception):
    """Base of every error that Lamina raises on purpose."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}. {remedy}")
        self.cause = cause
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:  # errors may cross processes by pickle
        return type(self), (self.cause, self.remedy)


class UsageError(LaminaError):
    """A call was made wrongly: an argument of the wrong kind, or out of order. It did nothing."""


class SettingsError(LaminaError):
    """A user setting is unknown, malformed or out of range."""


class GeometryError(LaminaError):
    """KV memory is described in a way that cannot be represented or does not add up."""


class BoardError(LaminaError):
    """A board is truncated, unsealed or of another version."""


class DeviceError(LaminaError):
    """Memory could not be exported, opened or copied."""


class CopyDeniedError(DeviceError):
    """The kernel refused a copy between the two processes."""


class PeerGoneError(DeviceError):
    """The process at the other end of a copy has died."""


class ServerUnavailableError(LaminaError):
    """No server answers on the socket, or it died."""


class UntrustedServerError(ServerUnavailableError):
    """Who answers on the socket is of a user, or lies in a directory, that is not trusted."""


class RequestRefusedError(LaminaError):
    """The server answered a request with a typed error; also raised by its handlers."""

    def __init__(self, code: ErrorCode, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.cause, self.remedy)


def refuse(cause: str, remedy: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> RequestRefusedError:
    """The error for a handler to raise when a request cannot be served."""
    return RequestRefusedError(code, cause, remedy)
