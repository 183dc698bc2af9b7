"""Mistakes that an engine's author makes: each ends its own call, and says what was wrong.

All against a real server, whose leases, pins and connection are looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import client as lamina
from lamina.client import (
    MISS,
    Allocation,
    Client,
    ClientSettings,
    Gate,
    Geometry,
    GeometryError,
    Group,
    HostWorkerDevice,
    KeyChain,
    LaminaError,
    Layer,
    Namespace,
    PageMap,
    PlanePages,
    RequestRefusedError,
    SettingsError,
    StepGates,
    Ticket,
    TransferStatus,
    UsageError,
)
from lamina.client.client import LookupResult
from lamina_lab.known.content import equal_layers, ids, random_keys
from tests.support.misused import BLOCKS, ELSEWHERE, KEYS, find, new_client, retrieve
from tests.support.server import ServerThread
from tests.support.wait import eventually
from tests.support.worker import PageWorker

LONE = "\udc80"
"""What JSON may contain and UTF-8 may not."""


# Names, keys and numbers


def calls_of(client: Client, ticket: Ticket) -> dict[str, Callable[[Any], object]]:
    """What takes a name, with one more argument than the name."""
    return {
        "lookup": lambda name: client.lookup(name, KEYS),
        "retrieve": lambda name: client.retrieve(name, 1, 0, [ids(ELSEWHERE)], 1, ticket),
        "end_request": client.end_request,
    }


@pytest.mark.parametrize("call", ["lookup", "retrieve", "end_request"])
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        (LONE, r"name '\\udc80' is no valid Unicode"),
        (7, "name 7 is of type int"),
        (b"r", "bytes"),
    ],
)
def test_a_request_whose_name_is_no_text(
    worker: PageWorker, is_unharmed: Callable[[], bool], call: str, name: Any, cause: str
) -> None:
    calls = calls_of(worker.client, worker.client.write_ticket())
    with pytest.raises(UsageError, match=cause):
        calls[call](name)
    find(worker)
    worker.client.end_request("r")
    assert is_unharmed()


@pytest.mark.parametrize("name", [LONE, 7])
def test_an_engine_whose_name_is_no_text(name: Any) -> None:
    with pytest.raises(UsageError, match="the engine's label"):
        Client(ClientSettings(), HostWorkerDevice(), name)
    with pytest.raises(UsageError, match="the engine's name"):
        Client(ClientSettings(), HostWorkerDevice(), "label", engine=name)


@pytest.mark.parametrize(
    "keys", [["a" * 32], [b"abc"], [KEYS[0], KEYS[1][:31]], KEYS[0], [1, 2], "a" * 32, [None]]
)
def test_keys_that_are_none(worker: PageWorker, is_unharmed: Callable[[], bool], keys: Any) -> None:
    with pytest.raises(UsageError, match=r"keys .* are not all bytes of length 32"):
        worker.client.lookup("r", keys)
    with pytest.raises(UsageError, match=r"keys .* are not all bytes of length 32"):
        worker.client.store(b"", keys, [ids(BLOCKS)], worker.client.write_ticket())
    assert is_unharmed()


def test_a_store_of_nothing(worker: PageWorker) -> None:
    with pytest.raises(UsageError, match="a store has no keys"):
        worker.client.store(b"", [], [ids([])], worker.client.write_ticket())


@pytest.mark.parametrize("parent", [None, "", "a" * 32, b"abc"])
def test_a_parent_that_is_no_key(worker: PageWorker, parent: Any) -> None:
    with pytest.raises(UsageError, match=r"the parent .* is no key"):
        worker.client.store(parent, KEYS, [ids(BLOCKS)], worker.client.write_ticket())


def test_a_wrong_parent_is_never_found_and_does_no_harm(
    worker: PageWorker, is_unharmed: Callable[[], bool]
) -> None:
    """Only the engine knows which chunk is its prompt's first."""
    chain = random_keys(3)
    stored = worker.store(chain[1:], BLOCKS)
    assert stored.ended is not None
    assert stored.ended.stored == 2
    assert worker.client.lookup("r", chain).wait(20) == MISS
    assert is_unharmed()


@pytest.mark.parametrize("argument", ["lease", "start_tokens", "layers_per_slice"])
@pytest.mark.parametrize("number", [None, "1", 1.0])
def test_a_number_that_is_none(
    worker: PageWorker, is_unharmed: Callable[[], bool], argument: str, number: Any
) -> None:
    with pytest.raises(UsageError, match=f"{argument} .* is of type"):
        retrieve(worker, **{"lease": 1, argument: number})
    assert is_unharmed()


def test_numbers_of_numpy_are_numbers(worker: PageWorker) -> None:
    lease: Any = np.int64(find(worker))
    begun = retrieve(worker, lease, start_tokens=np.int32(0), layers_per_slice=np.int64(3))
    assert begun.outcome is TransferStatus.OK


def test_what_cannot_be_sent_takes_no_slot(
    worker: PageWorker, is_unharmed: Callable[[], bool]
) -> None:
    with pytest.raises(UsageError, match="a Retrieve cannot be sent"):
        worker.client.retrieve("r", 2**70, 0, [ids(ELSEWHERE)], 1)
    with pytest.raises(UsageError, match="a EndLease cannot be sent"):
        worker.client.end_lease(2**70)
    assert not worker.client.transfers_in_flight
    assert is_unharmed()


# Tickets


@pytest.mark.parametrize("ticket", [0, 1, 99, None])
def test_a_ticket_is_what_write_ticket_has_returned(
    worker: PageWorker, is_unharmed: Callable[[], bool], ticket: Any
) -> None:
    with pytest.raises(UsageError, match=r"the ticket .* is none"):
        worker.client.store(b"", random_keys(2), [ids(BLOCKS)], ticket)
    if ticket is not None:
        with pytest.raises(UsageError, match=r"the ticket .* is none"):
            worker.client.retrieve("r", 1, 0, [ids(ELSEWHERE)], 1, ticket)
    assert is_unharmed()


def test_a_ticket_of_a_lost_connection_begins_nothing(worker: PageWorker) -> None:
    """It would be reached too early on the next board, or never."""
    earlier = worker.client.write_ticket()
    assert worker.client._link is not None
    worker.client._link.connection.close()
    worker.wait(lambda: worker.client._link is None)
    without = worker.client.write_ticket()
    worker.wait(lambda: worker.client.is_usable)
    for ticket in (earlier, without):
        assert worker.client.store(b"", random_keys(2), [ids(BLOCKS)], ticket) is None
        assert worker.client.retrieve("r", 1, 0, [ids(ELSEWHERE)], 1, ticket) is None
    assert not worker.client.transfers_in_flight


# The order of calls


def test_without_register_nothing_is_stored_or_retrieved(worker: PageWorker) -> None:
    with new_client(worker) as client:
        client.connect()
        calls: list[Callable[[], object]] = [
            client.write_ticket,
            lambda: client.store(b"", KEYS, [ids(BLOCKS)], Ticket(0, None)),
            lambda: client.retrieve("r", 1, 0, [ids(BLOCKS)], 1),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="has registered no KV memory"):
                call()
        assert client.lookup("q", KEYS).wait(20) is not None


def test_register_is_for_the_time_before_connect(worker: PageWorker) -> None:
    geometry = worker.geometry
    with new_client(worker) as client:
        client.connect()
        with pytest.raises(UsageError, match="is connected already"):
            client.register(geometry, PageMap((1,), ()), [])
    with pytest.raises(UsageError, match="has registered already"):
        worker.client.register(geometry, PageMap((1,), ()), [])


def test_a_description_of_kv_that_cannot_be_sent(worker: PageWorker) -> None:
    pages = np.zeros((4, 16), np.uint8)
    page_map = PageMap((4,), ((PlanePages(0, 0, 16),),))
    allocation = Allocation(pages.ctypes.data, pages.nbytes)
    description: Any = "text"
    for name, said, cause in ((LONE, b"", "surrogates"), ("layer", description, "bytes")):
        geometry = Geometry(64, (Group(16),), (Layer(name, 0, 1, 16),))
        with new_client(worker) as client, pytest.raises(UsageError, match=cause):
            client.register(geometry, page_map, [allocation], said)


def test_a_geometry_with_other_chunks_is_refused_with_the_servers_reason(
    worker: PageWorker,
) -> None:
    pages = np.zeros((4, 16), np.uint8)
    allocation = Allocation(pages.ctypes.data, pages.nbytes)
    geometry = Geometry(128, (Group(16),), (Layer("layer", 0, 1, 16),))
    with new_client(worker) as client:
        client.register(geometry, PageMap((4,), ((PlanePages(0, 0, 16),),)), [allocation])
        with pytest.raises(RequestRefusedError, match="have 128 tokens, the server's 64"):
            client.connect()


def test_use_after_close_raises_and_ending_things_does_not(worker: PageWorker) -> None:
    with new_client(worker) as client:
        client.connect()
        assert client.is_usable
    assert not client.is_usable
    calls: list[Callable[[], object]] = [
        client.poll,
        client.connect,
        client.write_ticket,
        lambda: client.workers(1),
        lambda: client.lookup("r", KEYS),
        lambda: client.retrieve("r", 1, 0, [ids(BLOCKS)], 1),
        lambda: client.store(b"", KEYS, [ids(BLOCKS)], Ticket(0, None)),
        lambda: client.register(worker.geometry, PageMap((1,), ()), []),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="the client is closed"):
            call()
    client.end_request("r")
    client.end_lease(1)
    client.close()


def test_a_lookup_is_answered_without_poll(server: ServerThread, worker: PageWorker) -> None:
    lookup = worker.client.lookup("r", KEYS)
    result: list[LookupResult] = []

    def is_answered() -> bool:
        if found := lookup.result:
            result.append(found)
        return bool(result)

    eventually(is_answered)
    assert result[0].chunks == len(KEYS)


def test_an_answer_that_nobody_has_read_in_time_is_no_miss(
    server: ServerThread, socket_path: Path
) -> None:
    now_s = 0.0
    worker = PageWorker(socket_path, clock=lambda: now_s)
    worker.store(KEYS, BLOCKS)
    lookup = worker.client.lookup("r", KEYS)
    server.after_reading(lambda: None)
    now_s = 1000.0
    assert lookup.result is not None
    assert lookup.result.chunks == len(KEYS)
    worker.close()


def test_a_step_that_never_waits_fails(worker: PageWorker) -> None:
    begun = worker.client.retrieve("r", find(worker), 0, [ids(ELSEWHERE)], 1)
    assert begun is not None
    gates = StepGates(worker.client.device, [Gate(begun, 1)])
    gates.gates = (Gate(begun, 1),)  # armed, however fast its slices have landed
    assert gates.settle() == [begun]


# What there is to import


def test_everything_that_is_needed_is_named_in_one_place() -> None:
    for name in lamina.__all__:
        assert hasattr(lamina, name)
    errors = (GeometryError, RequestRefusedError, SettingsError, UsageError)
    assert all(issubclass(error, LaminaError) for error in errors)
    geometry = equal_layers()
    namespace = Namespace(model="m", weights="w", dtype="u8", geometry=geometry.digest)
    assert len(KeyChain(namespace, 64).extend(range(128))) == 2
