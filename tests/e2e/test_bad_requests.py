"""Messages at the wrong time, KV memory that cannot be served, transfers that cannot be, copies
that are not permitted: each a typed error that names cause and remedy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lamina import protocol
from lamina.board import TransferStatus
from lamina.client import MISS
from lamina.errors import ErrorCode, GeometryError, RequestRefusedError, SettingsError
from lamina.geometry import Geometry, Group, PageMap, PlanePages
from lamina.linux import Peer, peer_of
from lamina_lab.known.content import equal_layers, ids, random_keys
from tests.e2e.strangers import (
    BLOCKS,
    GEOMETRY,
    SLOTS,
    Bystander,
    Pages,
    Stranger,
    assert_refused,
    frame,
    lease_of,
    retrieve,
)
from tests.support.server import ServerProcess, connected_client
from tests.support.worker import PageWorker

# Messages at the wrong time.


@pytest.mark.parametrize(
    "message",
    [
        protocol.Lookup(5, "r", (b"k" * 32,)),
        protocol.EndLease(5, 1),
        protocol.EndRequest(5, "r"),
        protocol.Clear(5),
        protocol.Workers(5),
        Pages().register(5),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_request_before_hello(stranger: Stranger, message: protocol.Message) -> None:
    stranger.greet()
    assert_refused(stranger.ask(message), ErrorCode.BAD_REQUEST, "not said hello", "Send Hello")
    assert isinstance(stranger.ask(protocol.Hello(6, "late", "late")), protocol.Welcome)


def test_hello_is_said_once(guest: Stranger) -> None:
    reply = guest.ask(protocol.Hello(5, "other", "other"))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "said hello before")


@pytest.mark.parametrize("name", ["", "e" * 129])
def test_an_engine_has_a_name_of_reasonable_length(stranger: Stranger, name: str) -> None:
    stranger.greet()
    reply = stranger.ask(protocol.Hello(5, name, "label"))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "1 to 128 characters")


@pytest.mark.parametrize(
    "message",
    [
        protocol.Retrieve(5, 8, 1, 0, (protocol.pack_block_ids(ids([0])),), 0, 0, 1),
        protocol.Store(5, 9, b"", (b"k" * 32,), (protocol.pack_block_ids(ids(range(4))),), 0),
    ],
    ids=["retrieve", "store"],
)
def test_a_transfer_before_register(guest: Stranger, message: protocol.Message) -> None:
    assert_refused(guest.ask(message), ErrorCode.NOT_REGISTERED, "no KV memory", "Register")


def test_a_worker_registers_once(worker_guest: Stranger, pages: Pages) -> None:
    reply = worker_guest.ask(pages.register(5))
    assert_refused(reply, ErrorCode.ALREADY_REGISTERED, "before", "Register once")
    assert isinstance(worker_guest.ask(protocol.Ping(6)), protocol.Pong)


# KV memory that cannot be served.


def test_an_arena_smaller_than_one_chunk(guest: Stranger) -> None:
    pages = Pages(equal_layers(layers=2, page_bytes=256 << 10))
    reply = guest.ask(pages.register(5))
    assert_refused(reply, ErrorCode.BAD_GEOMETRY, "one chunk takes 2097152 bytes", "--arena")


def test_a_client_is_told_that_the_arena_is_smaller_than_one_chunk(
    bystander: Bystander, socket_path: Path
) -> None:
    with pytest.raises(RequestRefusedError, match=r"the arena has 1048576.*--arena"):
        PageWorker(socket_path, equal_layers(layers=2, page_bytes=256 << 10))


def test_another_chunk_size_than_the_servers(guest: Stranger) -> None:
    geometry = Geometry(128, GEOMETRY.groups, GEOMETRY.layers)
    reply = guest.ask(Pages(geometry).register(5))
    assert_refused(reply, ErrorCode.BAD_GEOMETRY, "have 128 tokens", "64", "--chunk-tokens")


def test_a_block_size_that_does_not_divide_the_chunk(guest: Stranger) -> None:
    with pytest.raises(GeometryError, match="block size 24 of group 0 does not divide the chunk"):
        Geometry(64, (Group(24),), GEOMETRY.layers)
    layers = [["l", 0, 1, 512]]
    register = ["Register", 5, "host", [64, [[24]], layers], [[16], [[[0, 0, 512]]]], []]
    guest.send_bytes(frame(msgspec.msgpack.encode(register)))
    reply = guest.receive()
    assert_refused(reply, ErrorCode.MALFORMED, "block size 24", "does not divide", "multiple")


def test_pages_outside_their_region_or_over_each_other(guest: Stranger, pages: Pages) -> None:
    planes = list(pages.page_map.planes)
    beyond = PageMap((BLOCKS,), (*planes[:-1], (PlanePages(0, pages.pages.nbytes - 512, 512),)))
    twice = PageMap((BLOCKS,), (*planes[:-1], planes[0]))
    nowhere = PageMap((BLOCKS,), (*planes[:-1], (PlanePages(7, 0, 512),)))
    for number, (page_map, word) in enumerate(
        [(beyond, "ends at byte"), (twice, "overlap"), (nowhere, "region 7 of 1")]
    ):
        register = protocol.Register(5 + number, "host", GEOMETRY, page_map, pages.regions)
        assert_refused(guest.ask(register), ErrorCode.BAD_GEOMETRY, word)
    assert isinstance(guest.ask(pages.register(9)), protocol.Registered)


def test_a_device_that_the_server_does_not_have(guest: Stranger, pages: Pages) -> None:
    register = protocol.Register(5, "abacus", GEOMETRY, pages.page_map, pages.regions)
    assert_refused(guest.ask(register), ErrorCode.BAD_REQUEST, "'abacus'", "host")


@pytest.mark.parametrize(
    ("handle", "word"),
    [(b"", "no host address"), (b"\0" * 8, "must keep"), (b"\xff" * 8, "address")],
    ids=["none", "unmapped", "beyond"],
)
def test_memory_that_is_not_there(guest: Stranger, pages: Pages, handle: bytes, word: str) -> None:
    regions = (protocol.Region(handle, pages.pages.nbytes),)
    register = protocol.Register(5, "host", GEOMETRY, pages.page_map, regions)
    assert_refused(guest.ask(register), ErrorCode.BAD_REQUEST, word)
    assert isinstance(guest.ask(pages.register(6)), protocol.Registered)


# Transfers that cannot be.


@pytest.mark.parametrize(
    ("blocks", "fields", "word"),
    [
        ([0, 1, 2, 3, 4, 5, 6, BLOCKS], {}, "outside [0, 16)"),
        ([0, 1, 2, 3, 4, 5, 6, -1], {}, "outside [0, 16)"),
        ([0, 1, 2, 3, 4, 5, 6, 6], {}, "named twice"),
        (range(9), {}, "does not fit the 128 tokens"),
        ([], {}, "does not fit"),
        (range(8), {"start_tokens": 16}, "does not fit"),
        (range(4), {"start_tokens": 8}, "does not lie on blocks"),
        (range(4), {"start_tokens": -16}, "does not lie on blocks"),
        (range(8), {"block_ids": ()}, "0 groups"),
        (range(8), {"block_ids": (b"", b"")}, "2 groups"),
        (range(8), {"block_ids": (b"abc",)}, "multiple of 4"),
        (range(8), {"layers_per_slice": 0}, "0 layers a slice"),
        (range(8), {"layers_per_slice": 5}, "5 layers a slice does not fit 4 layers"),
        (range(8), {"slot": SLOTS}, "slot 8"),
        (range(8), {"slot": -1}, "slot -1"),
        (range(8), {"base": 2**32}, "32-bit"),
        (range(8), {"base": -1}, "32-bit"),
        (range(8), {"transfer": -1}, "-1 is negative"),
    ],
    ids=str,
)
def test_a_retrieve_that_cannot_be_is_refused_before_a_byte_is_written(
    bystander: Bystander,
    worker_guest: Stranger,
    pages: Pages,
    blocks: Sequence[int],
    fields: dict[str, Any],
    word: str,
) -> None:
    lease = lease_of(worker_guest, bystander)
    reply = worker_guest.ask(retrieve(lease, blocks, **fields))
    assert_refused(reply, ErrorCode.BAD_REQUEST, word)
    assert not pages.pages.any(), "it wrote all the same"
    gauges = bystander.server.gauges()
    assert (gauges["leases"], gauges["pins"]) == (0, 0), "nobody would have ended its lease"
    done = worker_guest.ask(retrieve(lease_of(worker_guest, bystander)))
    assert isinstance(done, protocol.Retrieved), "the connection is unharmed"
    assert done.status == 0
    assert pages.pages.any()


def test_an_unknown_lease_an_ended_one_and_somebody_elses(
    bystander: Bystander, worker_guest: Stranger, connect: Callable[[], Stranger]
) -> None:
    reply = worker_guest.ask(retrieve(12345))
    assert_refused(reply, ErrorCode.UNKNOWN_LEASE, "no lease 12345", "look the prompt up again")
    other = connect()
    other.greet()
    other.ask(protocol.Hello(1, "other engine", "other"))
    theirs = lease_of(other, bystander)
    assert_refused(worker_guest.ask(retrieve(theirs)), ErrorCode.UNKNOWN_LEASE, f"{theirs}")
    assert isinstance(worker_guest.ask(protocol.EndLease(30, theirs)), protocol.Done)
    assert bystander.server.gauges()["leases"] == 1, "it ended somebody else's lease"
    ours = lease_of(worker_guest, bystander)
    worker_guest.ask(protocol.EndLease(31, ours))
    assert_refused(worker_guest.ask(retrieve(ours)), ErrorCode.UNKNOWN_LEASE, f"{ours}")


@pytest.mark.parametrize(
    ("keys", "blocks", "word"),
    [
        ((), range(4), "at least one key"),
        ((b"short",), range(4), "each of 32 bytes"),
        ((b"k" * 32, b"k" * 32), range(8), "named twice"),
        ((b"k" * 32,), range(3), "48 tokens"),
        ((b"k" * 32,), range(8), "does not fit the 64 tokens"),
        ((b"k" * 32,), [0, 1, 2, BLOCKS], "outside [0, 16)"),
        ((b"k" * 32,), [0, 1, 2, 2], "named twice"),
    ],
    ids=str,
)
def test_a_store_that_cannot_be(
    bystander: Bystander,
    worker_guest: Stranger,
    keys: tuple[bytes, ...],
    blocks: Sequence[int],
    word: str,
) -> None:
    packed = (protocol.pack_block_ids(ids(blocks)),)
    reply = worker_guest.ask(protocol.Store(20, 9, b"", keys, packed, 0))
    assert_refused(reply, ErrorCode.BAD_REQUEST, word)
    assert bystander.server.gauges()["chunks"] == 2


@pytest.mark.parametrize("keys", [(), (b"",), (b"k" * 31,), (b"k" * 32,) * 2], ids=str)
def test_a_lookup_that_cannot_be(guest: Stranger, keys: tuple[bytes, ...]) -> None:
    assert_refused(guest.ask(protocol.Lookup(20, "r", keys)), ErrorCode.BAD_REQUEST, "key")


def test_chunks_of_another_geometry_are_not_retrieved(
    bystander: Bystander, guest: Stranger
) -> None:
    """Equal keys for different layouts are an engine's mistake; bytes do not fit."""
    pages = Pages(equal_layers(layers=2))
    guest.ask(pages.register(2))
    reply = guest.ask(retrieve(lease_of(guest, bystander)))
    assert_refused(reply, ErrorCode.BAD_REQUEST, "another geometry", "namespace")
    assert not pages.pages.any()


def test_a_client_refuses_a_width_above_the_layer_count_and_loses_no_slot(
    bystander: Bystander,
) -> None:
    worker = bystander.worker
    with pytest.raises(SettingsError, match=r"is 5, but the model has 4 layers\. Use 1 to 4"):
        PageWorker(bystander.server.settings.socket, GEOMETRY, layerwise_overlap=5)
    lease = worker.find("r", bystander.keys)
    for width in (0, 5):
        with pytest.raises(GeometryError, match=f"width of {width} layers"):
            worker.begin_leased("r", lease, range(8, 16), width)
    worker.client.end_request("r")
    assert worker.client._link is not None
    assert worker.client._link.transfers is not None
    transfers = worker.client._link.transfers
    assert transfers is not None
    assert len(transfers._free_slots) == transfers.slots


# No permission.


def forbid_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_between(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("lamina.devices.host.copy_between", copy_between)


def test_a_worker_whose_memory_may_not_be_copied_is_told_why_and_what_to_do(
    bystander: Bystander, guest: Stranger, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        forbid_copies(patch)
        reply = guest.ask(pages.register(2))
    assert_refused(reply, ErrorCode.COPY_DENIED, "forbids", "ptrace_scope", "CAP_SYS_PTRACE")
    assert isinstance(guest.ask(pages.register(3)), protocol.Registered)


def test_copies_that_become_forbidden_fail_their_transfers_alone(
    bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, keys = bystander.worker, random_keys(1)
    with monkeypatch.context() as patch:
        forbid_copies(patch)
        retrieve = worker.retrieve("r", bystander.keys, range(8, 16))
        store = worker.store(keys, range(4))
    assert retrieve.outcome is TransferStatus.COPY_FAILED
    assert store.ended is not None
    assert (store.ended.status, store.ended.stored) == (TransferStatus.COPY_FAILED, 0)
    assert worker.client.lookup("s", keys).wait(20) == MISS


def test_the_kernels_own_refusal_is_explained(socket_path: Path) -> None:
    """A server without CAP_SYS_PTRACE, and an engine that is not dumpable: root or not, EPERM."""
    servers: list[ServerProcess] = []

    def start_without_capability() -> None:
        _prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE)  # of this thread, so of its children only
        servers.append(ServerProcess(socket_path, "--arena", "1MiB", "--chunk-tokens", "64"))

    thread = threading.Thread(target=start_without_capability)
    thread.start()
    thread.join()
    servers[0].wait_until_serving()
    _prctl(_PR_SET_DUMPABLE, 0)
    try:
        with pytest.raises(RequestRefusedError, match=r"forbids copies.*ptrace_scope") as refusal:
            PageWorker(socket_path, GEOMETRY, BLOCKS)
        assert refusal.value.code is ErrorCode.COPY_DENIED
        connected_client(socket_path).close()  # lookups and commands need no permission
    finally:
        _prctl(_PR_SET_DUMPABLE, 1)
        servers[0].stop()


_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _CAP_SYS_PTRACE = 4, 24, 19


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def test_a_peer_of_another_user_is_turned_away(
    connect: Callable[[], Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory keeps others out already; this is the second lock."""

    def peer_of_another(sock: socket.socket) -> Peer:
        return peer_of(sock)._replace(uid=os.geteuid() + 1)

    with monkeypatch.context() as patch:
        patch.setattr("lamina.server.listener.peer_of", peer_of_another)
        stranger = connect()
        stranger.greet()
        assert_refused(stranger.receive(), ErrorCode.FORBIDDEN, "user", "same user")
        assert stranger.is_closed()
