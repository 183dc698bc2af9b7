"""Ten thousand operations of several engines, after which nothing is held and no byte was wrong.

What `tests/test_life_cycle.py` does step by step, here without waiting in between: copies, replies
and the operations of three engines overlap as they will. The invariants are those of
`tests/support/life.py`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lamina.board import TransferStatus
from lamina_lab.known.content import random_prompt
from tests.support.life import GEOMETRY, Life, World
from tests.support.server import ServerThread
from tests.support.valve import Valve

OPERATIONS = 10_000
CHECK_EVERY = 20
ARENA_CHUNKS = 40
ENGINES = 3
REQUESTS = [f"r{number}" for number in range(6)]
WEIGHTS = {
    "serve": 30,
    "poll": 30,
    "compute": 12,
    "store": 6,
    "retrieve": 5,
    "finish_or_abort": 8,
    "preempt": 4,
    "cancel": 4,
    "not_needed": 2,
    "leave_lookup": 2,
    "hold": 1,
    "let_pass": 6,
    "break_link": 1,
    "pass_deadlines": 0.5,
    "expire_leases": 0.5,
    "die": 0.5,
    "clear": 0.2,
}


class Soak:
    """One method an operation; each does nothing where it makes no sense."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)

    def life(self) -> Life:
        return self.random.choice(self.world.lives)

    def valve(self) -> Valve:
        device = self.world.server.device
        return self.random.choice([device.retrieves, device.retrieves, device.stores])

    def serve(self) -> None:
        life, keys = self.life(), random_prompt(self.random)
        request = self.random.choice(REQUESTS)
        found = life.lookup(request, keys)
        if found:
            width = self.random.randint(1, len(GEOMETRY.layers))
            first_block = self.random.choice([0, 0, 1, 3, 4, 9])
            life.retrieve(request, first_block, width, 1, ticketed=self.random.random() < 0.2)
        if found < len(keys):
            life.store(keys, found)

    def store(self) -> None:
        keys = random_prompt(self.random)
        self.life().store(keys, self.random.randrange(len(keys)))

    def retrieve(self) -> None:
        if leased := self.world.leased:
            life, request = self.random.choice(leased)
            life.retrieve(request, 0, self.random.randint(1, 4), 1, ticketed=False)

    def poll(self) -> None:
        self.life().poll()

    def compute(self) -> None:
        self.life().compute()

    def finish_or_abort(self) -> None:
        if leased := self.world.leased:
            life, request = self.random.choice(leased)
            life.end_request(request)

    def preempt(self) -> None:
        if retrieves := self.world.retrieves:
            life, retrieve = self.random.choice(retrieves)
            life.end_request(retrieve.request)
            life.lookup(retrieve.request, random_prompt(self.random))

    def cancel(self) -> None:
        if retrieves := self.world.retrieves:
            life, retrieve = self.random.choice(retrieves)
            life.cancel(retrieve)

    def not_needed(self) -> None:
        if leased := self.world.leased:
            life, request = self.random.choice(leased)
            life.end_lease(request)

    def leave_lookup(self) -> None:
        self.life().leave_lookup(random_prompt(self.random))

    def hold(self) -> None:
        self.valve().close()

    def let_pass(self) -> None:
        valve = self.valve()
        if self.random.random() < 0.5:
            valve.open()
        else:
            valve.let_pass(self.random.randint(1, 6))

    def break_link(self) -> None:
        self.world.break_link(self.valve())

    def pass_deadlines(self) -> None:
        self.life().pass_deadlines()

    def expire_leases(self) -> None:
        self.world.expire_leases()

    def die(self) -> None:
        self.world.die(self.life())

    def clear(self) -> None:
        self.world.clear()


def test_after_10000_operations_nothing_is_held_and_no_byte_was_wrong(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.server.lane._MAX_YIELD_S", 0.001)  # retrieves are often held here
    server = ServerThread(socket_path, arena_bytes=ARENA_CHUNKS * GEOMETRY.chunk_bytes)
    world = World(server, ENGINES)
    try:
        soak = Soak(world, seed=20)
        operations = soak.random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=OPERATIONS)
        for number, operation in enumerate(operations):
            getattr(soak, operation)()
            if number % CHECK_EVERY == 0:
                world.check()
        world.finish()
        world.close()
    finally:
        world.abandon()
    assert world.ended[TransferStatus.OK] > OPERATIONS / 10
    for outcome in (
        TransferStatus.CANCELLED,
        TransferStatus.COPY_FAILED,
        TransferStatus.TIMED_OUT,
        TransferStatus.REFUSED,
    ):
        assert world.ended[outcome] > 10, f"no retrieve ended as {outcome!r}: nothing was tested"
    assert world.evicted() > ARENA_CHUNKS
