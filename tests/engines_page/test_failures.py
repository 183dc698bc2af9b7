"""The engine on the page serves the same tokens whatever fails, and gets every block back."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from lamina.client import StepGates, TransferStatus
from tests.engines_page.toy import CHUNKS, PROMPT, Toy
from tests.support.fault_server import FaultServer
from tests.support.server import ServerThread
from tests.support.wait import eventually


def test_a_layer_that_does_not_wait_is_noticed_and_computed_again(
    server: ServerThread, engine: Toy, cold: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_layer = StepGates.before_layer

    def all_but_one(gates: StepGates, layer: int) -> None:
        if layer != 2:
            before_layer(gates, layer)

    monkeypatch.setattr(StepGates, "before_layer", all_but_one)
    retrieves = server.device.retrieves
    retrieves.close()
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(engine.tokens)
        try:
            retrieves.let_pass(1)
            eventually(lambda: engine.stands_at)
        finally:
            retrieves.open()
        assert serving.result(20) == cold
    assert engine.outcomes == [TransferStatus.OK]
    assert server.totals()["retrieves"] == 1


@pytest.mark.parametrize("slices", [0, 3])
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("killed", TransferStatus.SERVER_DIED),
        ("stopped", TransferStatus.TIMED_OUT),
        ("broken", TransferStatus.COPY_FAILED),
    ],
)
def test_a_retrieve_that_fails_in_the_middle_is_computed_again(
    failing: tuple[FaultServer, Callable[..., Toy]],
    cold: list[int],
    fault: str,
    outcome: TransferStatus,
    slices: int,
) -> None:
    """Before its request is released, and while a layer waits. In the end no block is held."""
    server, make = failing
    engine = make(retrieve_timeout_ms=500 if fault == "stopped" else 20_000)
    server.call("retrieves.close")
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(engine.tokens)
        server.call("retrieves.let_pass", slices)
        server.call("retrieves.wait_until_held")
        if slices:
            eventually(lambda: engine.stands_at)
        if fault == "killed":
            server.kill()
        elif fault == "stopped":
            server.send(signal.SIGSTOP)
        else:
            server.call("break_retrieves")
            server.call("retrieves.open")
        assert serving.result(20) == cold
    assert engine.outcomes == [outcome]
    if fault == "stopped":
        assert engine.retrieves[0] in engine.engine.held
        server.send(signal.SIGCONT)
        server.call("retrieves.open")
    engine.settle()
    if fault != "killed":
        engine.forget()
        eventually(lambda: engine.engine.client.is_usable)
        assert engine.tokens() == cold
        assert engine.outcomes == [outcome, TransferStatus.OK]


def test_the_next_server_is_used_after_one_was_killed(
    failing: tuple[FaultServer, Callable[..., Toy]], cold: list[int], socket_path: Path
) -> None:
    server, make = failing
    engine = make()
    server.kill()
    assert engine.tokens() == cold
    assert engine.outcomes == []
    engine.forget()
    successor = FaultServer(socket_path)
    try:
        eventually(lambda: engine.engine.turn() or engine.engine.client.is_usable)
        assert engine.tokens() == cold
        engine.forget()
        assert engine.tokens() == cold
        assert engine.outcomes == [TransferStatus.OK]
    finally:
        successor.kill()


def test_a_retrieve_that_never_began_is_computed(
    server: ServerThread, engine: Toy, cold: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its lease ends with its request."""
    monkeypatch.setattr(engine.engine.client, "retrieve", lambda *_: None)
    assert engine.tokens() == cold
    assert not engine.engine.held
    assert server.totals()["hit_chunks"] == CHUNKS
    assert server.after_reading(server.server.gauges)["leases"] == 0


def test_blocks_of_stores_under_way_are_not_handed_out(
    server: ServerThread, make: Callable[..., Toy], toy: ModuleType, cold: list[int]
) -> None:
    """Three prompts whose stores the server holds back leave no room for a fourth."""
    engine = make()
    server.device.stores.close()
    prompts = [[number, *PROMPT[:270]] for number in range(4)]
    for prompt in prompts[:3]:
        engine.tokens(prompt)
    held = [int(block) for blocks in engine.engine.held.values() for block in blocks]
    assert len(held) == len(set(held)) == 3 * CHUNKS * toy.PER_CHUNK
    turns = engine.count("turn")
    forwards = engine.count("forward")
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(engine.tokens, prompts[3])
        try:
            eventually(lambda: len(turns) > 3)
            assert not forwards
        finally:
            server.device.stores.open()
        fourth = serving.result(20)
    engine.forget()
    assert engine.tokens(prompts[3]) == fourth
    assert engine.outcomes == [TransferStatus.OK]
    server.stop()
