"""A link: one connection from Hello to the end of its last transfer, with its board.

Engines reconnect; each time a new link begins with a new board, and the old one lives on until
nothing of it is in flight any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lamina import protocol
from lamina.board import RING_SLOTS, Board
from lamina.client.connection import Connection
from lamina.client.notices import Notices
from lamina.client.rings import Rings
from lamina.client.transfers import Transfers
from lamina.devices.base import EngineRings, WorkerDevice
from lamina.errors import DeviceError, ErrorCode
from lamina.geometry import Geometry, PageMap
from lamina.protocol import Region
from lamina.settings import ClientSettings
from lamina.shards import Shard

BOARD_SLOTS = 1024
"""Retrieves in flight or not yet acknowledged per connection; more wait as misses."""


@dataclass(frozen=True)
class Memory:
    """What a worker registers: what its KV is, where it lies, and what it says of itself to its
    engine's other processes. The server is shown `regions`: the allocations, or the `rings` in
    their place."""

    geometry: Geometry
    page_map: PageMap
    regions: tuple[Region, ...]
    description: bytes
    shard: Shard
    rings: EngineRings | None = None

    def to_message(self, number: int, device: str) -> protocol.Register:
        page_map = self.page_map if self.rings is None else None
        return protocol.Register(
            number, device, self.geometry, page_map, self.regions, self.description, self.shard
        )


class Link:
    """One connection with its board and its transfers, from Hello to the end of the last one.

    Raises `ServerUnavailableError`, also for a server that is not to be trusted, or `OSError` when
    this process lacks descriptors or memory.
    """

    def __init__(
        self,
        settings: ClientSettings,
        device: WorkerDevice,
        engine: str,
        label: str,
        model: str,
        memory: Memory | None,
        notices: Notices,
        are_rings_free: Callable[[], bool],
    ) -> None:
        """`are_rings_free`: whether no former connection may still use the rings."""
        self._are_rings_free = are_rings_free
        self._wanted_chunk_tokens = settings.chunk_tokens
        self._ask_every_s = settings.reconnect_every_ms / 1000
        self._device = device
        self._memory = memory
        self._notices = notices
        of_rings = len(RING_SLOTS) if memory is not None and memory.rings is not None else 0
        self.board = Board.create(BOARD_SLOTS + of_rings if memory else 0)
        try:
            self.connection = Connection(settings.socket, self.board, settings.server_uid)
        except BaseException:
            self.board.close()
            raise
        self._is_attached = False
        self.transfers: Transfers | None = None
        self.is_ready = False
        self.is_welcomed = False
        """Whether the server took us; a worker registers next."""
        self._is_registering = False
        self.refusal: protocol.ErrorReply | None = None
        self.chunk_tokens = 0
        self.lease_ttl_s = 0.0
        self.session = 0
        self._asked: Connection | None = None
        self._ask_again_s = 0.0
        self._hello_ns = time.monotonic_ns()
        self.connection.call(lambda n: protocol.Hello(n, engine, label, model), self._welcomed)

    @property
    def is_open(self) -> bool:
        """Whether the server took us and the connection stands."""
        return self.is_ready and not self.connection.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the connection is lost and nothing of it is in flight any more."""
        return self.connection.is_lost and (self.transfers is None or self.transfers.is_idle)

    def reap(self, successor: Connection | None, now_s: float) -> None:
        """Free what the server will not touch any more, once this connection is lost.

        Proven by the server's death, or by a living server's word on the `successor` connection.
        """
        if self.transfers is None:
            return
        self.transfers.reap()
        if self.is_over or successor is None or self._asked is successor:
            return
        if now_s >= self._ask_again_s:
            self._asked, self._ask_again_s = successor, now_s + self._ask_every_s
            successor.call(lambda n: protocol.EndSession(n, self.session), self._session_ended)

    def leave_device(self) -> None:
        """Wait until nothing that is enqueued on the device uses the board or the rings any more.
        Once the connection is closed, and all waits are ended or will be."""
        self.connection.close()
        if self._is_attached:
            self._device.detach(self.board)
            self._is_attached = False
        if self.transfers is not None:
            self.transfers.leave_rings()

    def close(self) -> None:
        """Only when it `is_over`, or its process ends."""
        self.leave_device()
        self.connection.server.close()
        self.board.close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of what is open, and undo nothing else."""
        self.connection.leave_to_parent()
        self.board.close()

    def _welcomed(self, reply: protocol.Reply | None) -> None:
        if not isinstance(reply, protocol.Welcome):
            self._refused(reply)
            return
        self.chunk_tokens = reply.chunk_tokens
        self.lease_ttl_s = reply.lease_ttl_s
        self.session = reply.session
        self.connection.set_server_clock(reply.server_clock_ns, self._hello_ns)
        wanted = self._wanted_chunk_tokens
        if wanted is not None and wanted != reply.chunk_tokens:
            self._refused(
                protocol.ErrorReply(
                    reply.id,
                    ErrorCode.BAD_GEOMETRY,
                    f"lamina.chunk_tokens is {wanted}, the server's chunks have "
                    f"{reply.chunk_tokens} tokens",
                    "Set both to the same number",
                )
            )
            return
        self.is_welcomed = True
        if self._memory is None:
            self.is_ready = True
            return
        self._device.admit(self.connection.server)
        self.go_on()

    def go_on(self) -> None:
        """Register, once that can be: rings have one connection at a time, and a former one has
        them until the server is done with it."""
        memory = self._memory
        if memory is None or not self.is_welcomed or self._is_registering:
            return
        if memory.rings is not None and not self._are_rings_free():
            return
        self._is_registering = True
        name = self._device.name
        self.connection.call(lambda n: memory.to_message(n, name), self._registered)

    def _registered(self, reply: protocol.Reply | None) -> None:
        if not isinstance(reply, protocol.Registered):
            self._refused(reply)
            return
        assert self._memory is not None
        try:  # only now: a server that refuses us is asked again and again
            self._device.attach(self.board)
        except DeviceError as error:
            self._refused(
                protocol.ErrorReply(reply.id, ErrorCode.BAD_BOARD, error.cause, error.remedy)
            )
            return
        self._is_attached = True
        memory, rings = self._memory, None
        if memory.rings is not None:
            rings = Rings(self.board, memory.rings, memory.geometry)
        self.transfers = Transfers(
            self.connection, self.board, memory.geometry, memory.page_map, self._notices, rings
        )
        self.is_ready = True

    def _session_ended(self, reply: protocol.Reply | None) -> None:
        if isinstance(reply, protocol.Done) and self.transfers is not None:
            self.transfers.end()
        elif isinstance(reply, protocol.ErrorReply) and reply.code is not ErrorCode.BAD_REQUEST:
            self._asked = None  # ask again: this server knows the session, and failed to answer

    def _refused(self, reply: protocol.Reply | None) -> None:
        if isinstance(reply, protocol.ErrorReply):
            self.refusal = reply
        self.connection.close()
