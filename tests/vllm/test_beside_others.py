"""One of a MultiConnector's connectors: vLLM's handshake is another's, blocks are everybody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from tests.support.server import ServerThread
from tests.vllm.engine import CHUNK_TOKENS, Engine, connector_config, random_tokens
from tests.vllm.modes import MODES
from tests.vllm.scheduler_harness import Rig

HIT = 4 * CHUNK_TOKENS
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.mark.parametrize("order", [1, -1], ids=["lamina-nixl", "nixl-lamina"])
def test_an_engine_with_nixl(model: Path, server: ServerThread, order: int) -> None:
    ours = connector_config(server.settings.socket)
    config = several(*[ours, NIXL][::order])
    engine = Engine(model, server.settings.socket, arguments={"kv_transfer_config": config})
    try:
        prompt = random_tokens(HIT + 20, 90, order + 1)
        expected = engine.ask(prompt, retrieve=False, store=False)
        for mode in ({}, *MODES.values()):
            engine.ask(prompt)
            engine.forget()
            found = engine.ask(prompt, **mode)
            assert found.cached == HIT
            assert found.tokens == expected.tokens
        engine.assert_idle(server)
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_another_connectors_handshake_is_none_of_ours(mode: str) -> None:
    rig = Rig(mode)
    before = rig.side._namespace
    assert rig.worker.get_handshake_metadata() is None  # vLLM takes the first that there is
    others = NixlHandshakePayload(compatibility_hash="x", agent_metadata_bytes=b"")
    rig.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): others, (0, 1): others})
    assert rig.side._namespace == before
    rig.close()
