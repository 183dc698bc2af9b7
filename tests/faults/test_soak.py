"""The soak in small, with every kind of fault; and it must see what it is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lamina_lab.known.content import chain, random_keys
from lamina_lab.known.worker import WrongBytesError
from lamina_lab.soak.engine import GEOMETRY, SoakEngine
from lamina_lab.soak.results import ServerLife, SoakSpec
from lamina_lab.soak.run import FAULTS, run_soak
from tests.support.server import ServerThread
from tests.support.worker import PageWorker


def test_engines_and_their_server_break_at_random_and_no_byte_is_wrong() -> None:
    """Rows 16, 32, 34, 60, 74: thousands of requests on a small arena while everything breaks."""
    report = run_soak(SoakSpec(minutes=0.2, engines=3, faults_per_minute=240, warm_up_s=5, seed=5))
    assert (report.wrong_bytes, report.hangs, report.leaks) == ([], [], [])
    assert report.is_flat, report.servers
    assert sum(report.faults.values()) >= 10
    assert set(report.faults) <= set(FAULTS)
    assert report.operations["retrieves"] > 0


def operate_often(engine: SoakEngine) -> None:
    for _ in range(5_000):
        engine.operate()


def test_wrong_bytes_are_seen(socket_path: Path) -> None:
    """Another engine stores garbage under the keys of the first prompts."""
    server = ServerThread(socket_path)
    liar = PageWorker(socket_path, GEOMETRY)
    for number in range(20):
        liar.compute(random_keys(1), range(4))
        liar.store(chain(f"document {number}"), range(4))
    engine = SoakEngine(socket_path, seed=1)

    with pytest.raises(WrongBytesError, match="landed, but not its bytes"):
        operate_often(engine)
    engine.close()
    liar.close()
    server.stop()


def test_a_late_write_is_seen(socket_path: Path) -> None:
    server = ServerThread(socket_path)
    engine = SoakEngine(socket_path, seed=1)
    engine.worker.pages[2, 0, engine.free[0], 17] ^= 1
    with pytest.raises(WrongBytesError, match="a free page was written"):
        operate_often(engine)
    engine.close()
    server.stop()


def test_what_is_held_at_the_end_is_a_leak(socket_path: Path) -> None:
    server = ServerThread(socket_path)
    engine = SoakEngine(socket_path, seed=1)
    assert engine.leaks() == []
    server.device.retrieves.close()
    worker = PageWorker(socket_path, GEOMETRY)
    engine.worker.begin_retrieve("r", worker.store_new(1), range(4))
    assert engine.leaks() == ["1 transfers are in flight"]
    engine.free.remove(0)
    assert "1 blocks are held" in engine.leaks()
    server.device.retrieves.open()
    engine.close()
    worker.close()
    server.stop()


def test_a_server_whose_memory_grows_is_not_flat() -> None:
    grown = ServerLife(lived_s=100, rss_least=100, rss_most=106)
    assert grown.rss_growth == pytest.approx(0.06)
    assert ServerLife(lived_s=1).rss_growth == 0
    assert np.isclose(ServerLife(lived_s=1, rss_least=100, rss_most=104).rss_growth, 0.04)
