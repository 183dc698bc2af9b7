"""Who is alive, how soon it is known, and that no wait and no clock outlives its owner."""

from __future__ import annotations

import ast
import signal
import time
from pathlib import Path

import pytest

import lamina
from lamina.board import TransferStatus
from tests.faults.scene import HIT_TOKENS, Scene
from tests.support.fault_server import FaultServer
from tests.support.server import connected_client
from tests.support.wait import eventually

BUSY_S = 0.25
"""How long a busy machine may not run a process that wants to."""


def test_a_stopped_server_is_suspect_50_ms_after_its_last_heartbeat(socket_path: Path) -> None:
    """Row 49: no lookup is begun at a server that was silent for `suspect_after_ms`."""
    server = FaultServer(socket_path)
    client = connected_client(socket_path, suspect_after_ms=50)
    try:
        eventually(lambda: client.is_usable)
        server.send(signal.SIGSTOP)
        stopped_s = time.monotonic()
        while client.is_usable:
            assert time.monotonic() - stopped_s < 1, "still trusted a second later"
        assert client._link is not None
        silent_s = client._link.connection.heartbeat_age_s()
        assert 0.05 <= silent_s < 0.05 + BUSY_S
        server.send(signal.SIGCONT)
        eventually(lambda: client.is_usable)
    finally:
        client.close()
        server.kill()


def test_an_engine_looks_nothing_up_at_a_suspect_server(scene: Scene) -> None:
    """Row 50: a stopped server costs a request nothing but its hit."""
    engine = scene.start_engine("impatient", suspect_after_ms=50)
    engine.call("populate")
    scene.server.send(signal.SIGSTOP)
    eventually(lambda: not engine.call("is_usable"))
    for number in range(5):
        assert engine.call("hit", f"uncached {number}") == 0
    scene.server.send(signal.SIGCONT)
    eventually(lambda: engine.call("is_usable"))
    eventually(lambda: engine.call("hit", "hit") == HIT_TOKENS)


def test_a_silent_server_and_its_return_are_said_once(scene: Scene) -> None:
    """Row 69: what the operator sees of a stopped server."""
    engine = scene.start_engine("impatient", suspect_after_ms=50)
    scene.server.send(signal.SIGSTOP)
    scene.step_until(lambda: "is silent" in str(engine.call("lines")), engine)
    scene.server.send(signal.SIGCONT)
    scene.step_until(lambda: "has its cache back" in str(engine.call("lines")), engine)
    assert str(engine.call("lines")).count("is silent") == 1


def test_an_engine_started_before_its_server_hits_once_that_is_there(scene: Scene) -> None:
    """Row 68: no server at first costs nothing but hits."""
    scene.kill_server()
    scene.engine.call("hit", "uncached")
    scene.start_server()
    scene.check_hits(scene.engine)


def test_ten_servers_die_one_after_another(scene: Scene) -> None:
    """Rows 46, 74: each time the engine re-registers and hits, and leaks no descriptor."""
    files = 0
    for number in range(10):
        scene.check_hits(scene.engine)
        files = files or scene.engine.call("open_files")
        assert scene.engine.call("open_files") == files, f"after {number} servers"
        scene.kill_server()
        scene.start_server()
    scene.check_hits(scene.engine)


def test_a_slice_that_never_lands_ends_its_request_and_no_other(scene: Scene) -> None:
    """Rows 32, 36, 52: its pages are held for as long as it takes, also over many steps."""
    scene.engine.call("populate")
    scene.server.call("retrieves.close")
    scene.engine.call("add", "hit")
    scene.engine.call("step_until_retrieving", "hit")
    scene.server.call("retrieves.wait_until_held")
    scene.engine.pass_deadlines()
    scene.engine.call("serve", "hit")
    assert scene.engine.call("outcome", "hit") is TransferStatus.TIMED_OUT
    for number in range(5):
        scene.engine.call("add", f"other {number}", 20 + number)
        scene.engine.call("serve", f"other {number}")
        assert scene.engine.call("quarantined") == 1
    scene.open_all()
    scene.check_hits(scene.engine)
    assert scene.engine.call("quarantined") == 0


@pytest.mark.parametrize("latest_first", [False, True])
@pytest.mark.parametrize("kind", ["Found", "Retrieved", "Stored"])
def test_replies_come_late_and_in_any_order(scene: Scene, kind: str, latest_first: bool) -> None:
    """Rows 4, 5: two requests at once, whose replies are held and may change places."""
    engine, server = scene.engine, scene.server
    for seed in (1, 2):
        engine.call("populate", seed)
    server.call("replies.hold", kind)
    for seed in (1, 2, 3, 4):
        engine.call("add", f"request {seed}", seed, 1, 1, True)
    if kind != "Found":
        for seed in (1, 2, 3, 4):
            engine.call("serve", f"request {seed}")
    server.call("replies.wait_until_held", kind, 4 if kind == "Found" else 2)
    server.call("replies.release_latest_first" if latest_first else "replies.release", kind)
    retrieved = [engine.call("serve", f"request {seed}") for seed in (1, 2, 3, 4)]
    assert retrieved == [HIT_TOKENS, HIT_TOKENS, 0, 0]


@pytest.mark.parametrize("kind", ["Welcome", "Registered"])
def test_a_server_that_is_slow_to_greet_costs_only_hits(scene: Scene, kind: str) -> None:
    """Row 50: the engine serves uncached until it is registered, and then hits."""
    scene.engine.call("populate")
    scene.server.call("replies.hold", kind)
    scene.server.call("hang_up")
    scene.engine.call("step")
    assert scene.engine.call("hit", "uncached") == 0
    scene.step_until(lambda: scene.server.call("replies.count", kind))
    assert scene.engine.call("hit", "uncached") == 0
    scene.server.call("replies.release", kind)
    scene.check_hits(scene.engine)


def test_a_found_that_comes_after_the_lookups_deadline_leaves_no_lease(scene: Scene) -> None:
    """Rows 56, 57: the request went on without it; its chunks must not stay pinned."""
    scene.engine.call("populate")
    scene.hold_replies("Found")
    scene.engine.call("add", "late")
    scene.server.call("replies.wait_until_held", "Found")
    scene.wait_for_gauges(leases=1)
    scene.engine.pass_deadlines()
    assert scene.engine.call("serve", "late") == 0
    scene.open_all()
    scene.step_until(lambda: scene.server.gauges()["leases"] == 0)
    scene.wait_for_gauges(pins=0)


@pytest.mark.parametrize("kind", ["Retrieved", "Stored", "Found", "Cancelled", "Done"])
def test_a_reply_that_never_comes_is_made_up_for_by_the_next_connection(
    scene: Scene, kind: str
) -> None:
    """Rows 5, 49: whatever was lost with the connection, nothing stays held."""
    scene.engine.call("populate", 2)
    scene.server.call("replies.hold", kind)
    scene.engine.call("add", "hit", 2)
    scene.engine.call("add", "save", 3, 1, 1, True)
    scene.engine.call("step")
    scene.engine.call("abort", "hit")
    scene.engine.pass_deadlines()
    scene.engine.call("serve", "save")
    scene.server.call("replies.drop", kind)
    scene.server.call("hang_up")
    scene.check_hits(scene.engine)


def test_a_message_that_comes_late_ends_nothing_of_a_later_request(scene: Scene) -> None:
    """Row 14: the end of a request that was aborted before it ran arrives after all else."""
    scene.engine.call("populate")
    scene.server.call("requests.hold", "EndRequest")
    scene.engine.call("add", "hit")
    scene.engine.call("abort", "hit")
    scene.server.call("requests.wait_until_held", "EndRequest")
    assert scene.engine.call("hit", "other") == HIT_TOKENS
    scene.server.call("requests.release", "EndRequest")
    scene.wait_for_gauges(leases=0, pins=0)


def test_a_server_that_is_busy_when_it_is_told_to_stop_stops(socket_path: Path) -> None:
    """A thousand retrieves of an engine that died had ended at once, and the signal was lost."""
    server = FaultServer(socket_path)
    server.call("crowd_loop")
    server.send(signal.SIGTERM)
    server.call("free_loop")
    try:
        assert server.join() == 0
    finally:
        server.kill()


def test_no_clock_that_can_be_set_is_read() -> None:
    """Deadlines, leases and heartbeats are monotonic: only a benchmark's report has a date, and
    only times of files are compared with the clock that dates them."""
    forbidden = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    package = Path(lamina.__file__).parent
    dated = {*(package / "bench").rglob("*.py"), package / "content.py"}
    for path in set(package.rglob("*.py")) - dated:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in forbidden, f"{path}:{node.lineno}"


def test_a_wall_clock_that_jumps_by_years_changes_nothing(scene: Scene) -> None:
    """Nobody times out, no lease runs out, nobody is suspect."""
    scene.engine.call("jump_wall_clock")
    scene.server.call("jump_wall_clock")
    scene.engine.call("populate")
    scene.engine.call("add", "hit")
    scene.engine.call("answered", "hit")
    scene.wait_for_gauges(leases=1)
    assert scene.engine.call("serve", "hit") == HIT_TOKENS
    assert scene.server.totals()["leases_expired"] == 0
    scene.check_hits(scene.engine)


@pytest.mark.parametrize("ahead_s", [-1e6, 1e6])
def test_an_engine_in_another_time_namespace_does_not_suspect_its_server(
    scene: Scene, ahead_s: float
) -> None:
    """Row 45: containers may have monotonic clocks of their own."""
    scene.engine.call("shift_monotonic_clock", ahead_s)
    scene.server.call("hang_up")
    scene.engine.call("step")
    scene.check_hits(scene.engine)


def test_both_stop_as_with_a_suspended_machine_and_go_on(scene: Scene) -> None:
    """Rows 48, 49: the engine wakes first, and sees a heartbeat that is old."""
    scene.engine.call("populate")
    scene.server.call("retrieves.close")
    scene.engine.call("add", "hit")
    scene.engine.call("step_until_retrieving", "hit")
    scene.server.call("retrieves.wait_until_held")
    scene.engine.send(signal.SIGSTOP)
    scene.server.send(signal.SIGSTOP)
    scene.engine.send(signal.SIGCONT)
    scene.engine.begin("serve", "hit")
    scene.server.send(signal.SIGCONT)
    scene.open_all()
    assert scene.engine.result() == HIT_TOKENS
