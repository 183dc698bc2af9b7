"""The demo's engine process: calibrates, populates the cache, then measures every arm.

Run as `python -m lamina_lab.demo.engine_process SPEC`; reports on standard output. It calibrates
before a server exists and waits for a line on standard input before it connects.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from lamina.client import Client, FixedPolicy, ReleasePolicy, Retrieve, WholePolicy
from lamina.devices.host import HostWorkerDevice
from lamina.settings import ClientSettings
from lamina_lab.demo.messages import (
    ARMS,
    EARLY_RELEASE,
    NO_RELEASE,
    RECOMPUTE,
    WHOLE,
    Calibrated,
    DemoSpec,
    Measured,
    Populated,
    Report,
    Timeline,
)
from lamina_lab.reference.config import ReferenceConfig
from lamina_lab.reference.engine import ReferenceEngine
from lamina_lab.reference.model import ReferenceModel
from lamina_lab.reference.request import Request

_CALIBRATION_ROUNDS = 3
_ARRIVAL_POLL_S = 200e-6
_SUSPECT_AFTER_MS = 1_000  # two cores shared by a server and an engine at full load


class DemoEngine:
    """Runs one request at a time on a reference engine."""

    def __init__(self, spec: DemoSpec) -> None:
        self.spec = spec
        config = ReferenceConfig(layers=spec.layers)
        self._blocks = 2 * -(-(spec.hit_tokens + spec.tail_tokens + 1) // config.block_tokens)
        self._model = ReferenceModel(config)
        self.client = Client(
            ClientSettings(socket=Path(spec.socket), suspect_after_ms=_SUSPECT_AFTER_MS),
            HostWorkerDevice(),
            "demo engine",
            model="reference Llama",
        )
        self.engine = ReferenceEngine(self._model, self._blocks, self.client, spec.chunk_tokens)
        rng = np.random.default_rng(0)
        self._documents = rng.integers(0, config.vocab, (spec.documents, spec.hit_tokens)).tolist()
        self._tails = rng.integers(0, config.vocab, (spec.documents, spec.tail_tokens)).tolist()
        self._policies: dict[str, ReleasePolicy | None] = {
            RECOMPUTE: None,
            WHOLE: WholePolicy(),
            NO_RELEASE: FixedPolicy(spec.layers_per_slice, spec.layers),
            EARLY_RELEASE: FixedPolicy(spec.layers_per_slice, 1),
        }

    def calibrate(self) -> Calibrated:
        """Time a tail's computation when its document is in the engine's own blocks."""
        engine = ReferenceEngine(self._model, self._blocks)
        engine.add("document", self._documents[0])
        engine.run()
        times = []
        for index in range(_CALIBRATION_ROUNDS):
            tail = [index, *self._tails[0][1:]]  # another first token: only the document hits
            request = engine.add(f"tail {index}", self._documents[0] + tail)
            engine.run()
            times.append(request.ttft_s)
        engine.close()
        bytes_per_token = self._model.config.kv_bytes_per_token
        return Calibrated(min(times), bytes_per_token * self.spec.hit_tokens)

    def populate(self, document: int) -> Populated:
        """Compute a document and wait until the server holds it."""
        self._serve("populate", self._documents[document], None, store=True)
        self.engine.drain()
        self._forget()
        return Populated(document)

    def measure(self, arm: str, document: int) -> Measured:
        """Serve a document with its tail, nothing of it in the engine's own blocks."""
        prompt = self._documents[document] + self._tails[document]
        request, retrieve = self._serve(arm, prompt, self._policies[arm])
        assert request.first_logits is not None
        digest = hashlib.sha256(request.first_logits.tobytes()).hexdigest()
        self.engine.drain()
        self._forget()
        while retrieve is not None and not retrieve.is_acknowledged:
            self.client.poll()
            time.sleep(_ARRIVAL_POLL_S)
        ended = retrieve.ended if retrieve is not None else None
        return Measured(
            arm,
            document,
            request.ttft_s,
            request.hit_tokens,
            ended.total_us / 1e6 if ended is not None else None,
            digest,
        )

    def timeline(self, arm: str) -> Timeline:
        """One more hit of an arm, watched layer by layer."""
        layers = self.spec.layers
        began, ended, arrived = [0.0] * layers, [0.0] * layers, [0.0] * layers

        def begin(layer: int) -> None:
            began[layer] = time.perf_counter()

        def end(layer: int) -> None:
            ended[layer] = time.perf_counter()

        self.engine.after_wait, self.engine.after_layer = begin, end
        prompt = self._documents[0] + self._tails[0]
        request = self.engine.add(f"timeline, {arm}", prompt, 1, self._policies[arm], store=False)
        watcher = threading.Thread(target=lambda: _watch(request, arrived))
        watcher.start()
        self.engine.run()
        watcher.join()
        self.engine.drain()
        self._forget()
        zero = request.arrived_s
        return Timeline(
            arm,
            [t - zero for t in arrived],
            [t - zero for t in began],
            [t - zero for t in ended],
            request.ttft_s,
        )

    def _serve(
        self, name: str, prompt: list[int], policy: ReleasePolicy | None, store: bool = False
    ) -> tuple[Request, Retrieve | None]:
        """Run a request to its end; with the retrieve that its computation waited for."""
        request = self.engine.add(name, prompt, 1, policy, store)
        retrieves: list[Retrieve] = []

        def note(layer: int) -> None:
            if request.gate is not None:  # until the request ends
                retrieves.append(request.gate.retrieve)

        self.engine.before_layer = note
        self.engine.run()
        return request, retrieves[-1] if retrieves else None

    def _forget(self) -> None:
        """Empty the engine's own prefix cache, and make sure by poisoning every block."""
        blocks = range(self.engine.pool.num_blocks)
        self.engine.pool.evict(blocks)
        self.engine.memory.poison(np.arange(len(blocks)))


def _watch(request: Request, arrived_s: list[float]) -> None:
    """Note when each layer's slice lands."""
    while request.gate is None:
        time.sleep(_ARRIVAL_POLL_S)
    retrieve = request.gate.retrieve
    for part in retrieve.slices:
        while retrieve.landed_slices <= part.number and retrieve.outcome is None:
            time.sleep(_ARRIVAL_POLL_S)
        for layer in range(part.first_layer, part.end_layer):
            arrived_s[layer] = time.perf_counter()


def _report(report: Report) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=DemoSpec)
    engine = DemoEngine(spec)
    _report(engine.calibrate())
    sys.stdin.readline()  # the server is up
    engine.client.connect()
    for document in range(spec.documents):
        _report(engine.populate(document))
    for document in range(spec.documents):
        for arm in ARMS:
            _report(engine.measure(arm, document))
    for arm in (WHOLE, EARLY_RELEASE):
        _report(engine.timeline(arm))
    engine.engine.close()


if __name__ == "__main__":
    main()
