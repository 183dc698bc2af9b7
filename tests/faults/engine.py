"""A real reference engine in a process of its own, driven by a test from stage to stage.

Whatever it serves it compares bit for bit, logits, tokens and KV, with what an engine without a
cache makes of the same prompt.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from lamina.board import TransferStatus
from lamina.client import Client, FixedPolicy, Retrieve, Ticket
from lamina.geometry import BlockIds
from lamina.settings import ClientSettings
from lamina_lab.known.stream import StreamDevice
from lamina_lab.reference.request import Request, State
from tests.lab.reference.engines import (
    SHARED,
    SMALL,
    Engine,
    assert_everything_is_given_back,
    assert_like_a_recompute,
    populate,
    tokens_of,
    wait_for_lookup,
)
from tests.support.remote import (
    Remote,
    jump_wall_clock,
    serve_commands,
    shared_event,
    shared_number,
)
from tests.support.wait import eventually

NUM_BLOCKS = 128


class FaultEngine(Remote):
    """An engine on the server at `socket`. Its clock is `ahead_s` ahead of this process's."""

    def __init__(self, socket: Path, name: str = "engine", **settings: Any) -> None:
        self.ahead_s = shared_number()
        self.is_waiting = shared_event()
        """Set while a step waits for the second layer's slice."""
        settings = {
            "suspect_after_ms": 5_000,
            "lookup_timeout_ms": 5_000,
            "reconnect_every_ms": 10,
            **settings,
        }
        wanted = ClientSettings(socket=socket, **settings)
        super().__init__(_main, wanted, name, self.ahead_s, self.is_waiting)

    def pass_deadlines(self) -> None:
        """Let the time of every transfer in flight run out."""
        self.ahead_s.value += 60.0

    def state(self, request: str) -> State:
        return State(self.call("state", request))


class _Client(Client):
    """Retrieves carry a ticket too while the stream, and with it tickets, is stopped."""

    def retrieve(
        self,
        request: str,
        lease: int,
        start_tokens: int,
        block_ids: Sequence[BlockIds],
        layers_per_slice: int,
        ticket: Ticket | None = None,
        number: int | None = None,
        deadline_s: float | None = None,
    ) -> Retrieve | None:
        assert isinstance(self.device, StreamDevice)
        if not self.device.is_running:
            ticket = self.write_ticket()
        return super().retrieve(
            request, lease, start_tokens, block_ids, layers_per_slice, ticket, number, deadline_s
        )


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Control:
    """What `FaultEngine.call` can call."""

    def __init__(self, settings: ClientSettings, name: str, ahead_s: Any, is_waiting: Any) -> None:
        self.log = _Log()
        logging.getLogger("lamina").addHandler(self.log)
        logging.getLogger("lamina").setLevel(logging.INFO)
        self.device = StreamDevice(is_running=True)
        self.client = _Client(
            settings, self.device, name, clock=lambda: time.monotonic() + ahead_s.value
        )
        self.engine = Engine(SMALL, NUM_BLOCKS, client=self.client)
        self._is_waiting = is_waiting
        self._requests: dict[str, Request] = {}
        self._retrieves: dict[str, Retrieve] = {}
        self.engine.before_layer = self._before_layer

    def hold_tickets(self) -> None:
        self.device.is_running = False

    def release_tickets(self) -> None:
        self.device.run()

    def connect(self) -> None:
        self.client.connect()

    def wait_until_usable(self) -> float:
        """Step without requests until the server is there; returns how many seconds it took."""
        started_s = time.monotonic()
        self.engine.step_until(lambda: self.client.is_usable)
        return time.monotonic() - started_s

    def populate(self, seed: int = 1) -> None:
        """Compute a prompt's chunks and wait until they are stored."""
        populate(self.engine, prompt_of(seed))
        self.forget()

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self.engine.pool.evict(range(self.engine.pool.num_blocks))

    def add(
        self,
        name: str,
        seed: int = 1,
        release_after: int = 1,
        new_tokens: int = 1,
        store: bool = False,
    ) -> None:
        self._requests[name] = self.engine.add(
            name, prompt_of(seed), new_tokens, FixedPolicy(1, release_after), store
        )

    def answered(self, name: str) -> None:
        """Wait for the request's lookup; it found all of the prompt's chunks."""
        assert wait_for_lookup(self._requests[name]).lease

    def step(self) -> None:
        self.engine.step()

    def step_until_retrieving(self, name: str) -> None:
        request = self._requests[name]
        self.engine.step_until(lambda: request.gate is not None)
        assert request.gate is not None
        self._retrieves[name] = request.gate.retrieve

    def step_until(self, name: str, state: str) -> None:
        self.engine.step_until(lambda: self._requests[name].state is State(state))

    def step_until_storing(self, stores: int = 1) -> None:
        """Until so many stores are in flight."""
        assert self.engine.cache is not None
        cache = self.engine.cache
        self.engine.step_until(lambda: len(cache._storing) >= stores)

    def wait_until_landed(self, name: str, slices: int) -> None:
        retrieve = self._retrieves[name]
        eventually(lambda: retrieve.landed_slices >= slices)

    def serve(self, name: str) -> int:
        """Step until the request is over and compare it; returns how many tokens were retrieved."""
        request = self._requests[name]
        if request.state is not State.ABORTED:
            self.engine.serve(request)
            assert_like_a_recompute(self.engine, request)
        return request.hit_tokens

    def hit(self, name: str, seed: int = 1, store: bool = False) -> int:
        """Serve a prompt with nothing of it in the engine's own blocks."""
        self.forget()
        self.add(name, seed, store=store)
        return self.serve(name)

    def abort(self, name: str) -> None:
        self.engine.abort(self._requests[name])

    def preempt(self, name: str) -> None:
        self.engine.scheduler.preempt(self._requests[name])

    def state(self, name: str) -> str:
        return self._requests[name].state.value

    def outcome(self, name: str) -> TransferStatus | None:
        return self._retrieves[name].outcome

    def is_over(self, name: str) -> bool:
        return self._retrieves[name].is_over

    def quarantined(self) -> int:
        return self.client.quarantined

    def held_blocks(self) -> int:
        return self.engine.pool.num_blocks - self.engine.pool.num_free

    def is_usable(self) -> bool:
        return self.client.is_usable

    def lose_connection(self) -> None:
        assert self.client._link is not None
        self.client._link.connection.close()

    def lines(self) -> list[str]:
        return self.log.lines

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def jump_wall_clock(self) -> None:
        jump_wall_clock()

    def shift_monotonic_clock(self, ahead_s: float) -> None:
        """As in a time namespace of its own; what is computed from it from now on is shifted."""
        monotonic, monotonic_ns = time.monotonic, time.monotonic_ns
        time.monotonic = lambda: monotonic() + ahead_s
        time.monotonic_ns = lambda: monotonic_ns() + int(ahead_s * 1e9)

    def finish(self) -> None:
        """End every request; then nothing may be left with anybody."""
        self.device.run()
        for request in self._requests.values():
            self.engine.abort(request)
        assert_everything_is_given_back(self.engine)

    def close(self) -> None:
        self.engine.close()

    def _before_layer(self, layer: int) -> None:
        if layer == 1:
            self._is_waiting.set()
        elif layer > 1:
            self._is_waiting.clear()


def prompt_of(seed: int) -> list[int]:
    """Four chunks that depend on the seed, then a part of one."""
    return (SHARED if seed == 1 else tokens_of(len(SHARED), seed)) + tokens_of(44, 1000 + seed)


def _main(commands: Pipe, settings: ClientSettings, name: str, ahead_s: Any, waiting: Any) -> None:
    control = _Control(settings, name, ahead_s, waiting)
    serve_commands(control, commands)
