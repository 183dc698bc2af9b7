"""A worker that gives up a store, at whatever stage and in whatever way, and reuses its pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lamina_lab.known.content import equal_layers, random_keys
from lamina_lab.known.stream import StreamDevice
from tests.support.fault_server import FaultServer
from tests.support.server import ServerThread
from tests.support.valve import Valve
from tests.support.wait import eventually
from tests.support.worker import PageWorker

CHUNKS = 4
BLOCKS = CHUNKS * 64
GEOMETRY = equal_layers(page_bytes=64, block_tokens=1)
"""With so many blocks, two layers at a time are planned and copied."""
BATCHES = 4
"""Of a store of `CHUNKS` chunks."""


class RemoteValve:
    """The stores' valve of a server in another process; methods as `Valve` has them."""

    def __init__(self, server: FaultServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return partial(self._server.call, f"stores.{name}")


class Scene:
    """`store` is of `keys`, out of all blocks of a worker whose clock and stream the test moves."""

    def __init__(self, path: Path, server: ServerThread | FaultServer) -> None:
        self._path = path
        self.server = server
        self.valve: Valve | RemoteValve = (
            RemoteValve(server) if isinstance(server, FaultServer) else server.device.stores
        )
        self.now_s = 0.0
        self.keys, self.keys_ahead = random_keys(CHUNKS), random_keys(CHUNKS)
        self._others: list[PageWorker] = []
        self.device = StreamDevice()
        self.worker = PageWorker(
            path,
            GEOMETRY,
            BLOCKS,
            clock=lambda: self.now_s,
            device=self.device,
            reconnect_every_ms=1,
        )

    def other(self) -> PageWorker:
        """Another engine."""
        self._others.append(PageWorker(self._path, GEOMETRY, BLOCKS))
        return self._others[-1]

    def begin(self, keys: Sequence[bytes] = (), computed: bool = True) -> None:
        """Begin the store."""
        keys = keys or self.keys
        self.worker.compute(keys, range(BLOCKS))
        self.store = self.worker.begin_store(keys, range(BLOCKS))
        if computed:
            self.device.compute()

    def use_pages(self) -> None:
        """The store is over, though the server may be anywhere: its pages are used for other KV."""
        assert self.store.is_over
        assert self.store.given_up
        self.device.compute()
        self.worker.poison(range(BLOCKS))

    def reconnect(self) -> None:
        """Until the worker has a connection."""

        def is_back() -> bool:
            self.now_s += 0.001
            self.worker.client.poll()
            return self.worker.client.is_usable

        eventually(is_back)

    def wait_for_gauges(self, **wanted: float) -> None:
        def are_there() -> bool:
            gauges = self.server.gauges()
            return all(gauges[name] == value for name, value in wanted.items())

        eventually(are_there)

    def let_all_pass(self) -> None:
        """Until the server has ended every store, and holds nothing for any."""
        self.valve.open()
        self.wait_for_gauges(queued_transfers=0, arena_reserved_bytes=0)

    def found(self, keys: Sequence[bytes] = ()) -> int:
        """How many of the chunks another engine finds; their bytes must be right."""
        reader, keys = self.other(), keys or self.keys
        result = reader.client.lookup("reader", keys).wait(20)
        assert result is not None
        blocks = range(result.chunks * BLOCKS // CHUNKS)
        if result.chunks:
            reader.check_hit("reader", keys[: result.chunks], blocks)
        return result.chunks

    def check_store_again(self) -> None:
        """The same keys can be stored by the same engine, over another connection if need be."""
        self.reconnect()
        self.begin()
        self.worker.wait(lambda: self.store.is_over)
        assert not self.store.given_up
        assert self.found() == CHUNKS

    def close(self) -> None:
        for worker in [self.worker, *self._others]:
            worker.close()


# Stages: each brings the store to a point in the server and holds it there.


def queued(scene: Scene) -> None:
    """Behind another engine's store, whose copies are held."""
    scene.valve.close()
    ahead = scene.other()
    ahead.compute(scene.keys_ahead, range(BLOCKS))
    ahead.begin_store(scene.keys_ahead, range(BLOCKS))
    scene.valve.wait_until_held()
    scene.begin()
    scene.wait_for_gauges(queued_transfers=2)


def ticket_awaited(scene: Scene) -> None:
    """The engine has not computed what is to be stored yet."""
    scene.begin(computed=False)
    scene.wait_for_gauges(queued_transfers=1)


def before_the_first_copy(scene: Scene) -> None:
    scene.valve.close()
    scene.begin()
    scene.valve.wait_until_held()


def half_copied(scene: Scene) -> None:
    scene.valve.close()
    scene.valve.let_pass(BATCHES // 2)
    scene.begin()
    scene.valve.wait_until_held()


def before_the_last_copy(scene: Scene) -> None:
    """Once that passes, the store is whole."""
    scene.valve.close()
    scene.valve.let_pass(BATCHES - 1)
    scene.begin()
    scene.valve.wait_until_held()


def copied_but_not_done(scene: Scene) -> None:
    scene.valve.hold_ends()
    scene.begin()
    scene.valve.wait_until_ending()


STAGES = [
    queued,
    ticket_awaited,
    before_the_first_copy,
    half_copied,
    before_the_last_copy,
    copied_but_not_done,
]


# Ways to give it up.


def at_its_deadline(scene: Scene) -> None:
    scene.now_s += scene.worker.client.settings.store_timeout_ms / 1000
    scene.worker.client.poll()


def with_all_others(scene: Scene) -> None:
    scene.worker.client.give_up_stores()


def after_the_connection_was_lost(scene: Scene) -> None:
    _lose_connection(scene)
    assert not scene.store.is_over
    at_its_deadline(scene)


def before_the_connection_is_lost(scene: Scene) -> None:
    with_all_others(scene)
    _lose_connection(scene)


def _lose_connection(scene: Scene) -> None:
    assert scene.worker.client._link is not None
    scene.worker.client._link.connection.close()
    scene.worker.client.poll()


WAYS = [
    at_its_deadline,
    with_all_others,
    after_the_connection_was_lost,
    before_the_connection_is_lost,
]
