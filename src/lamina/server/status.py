"""The HTTP port: Prometheus metrics, the same numbers as JSON, and a health check.

GET /metrics   Prometheus text        GET /status   JSON        GET /healthz   200 while serving
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lamina import __version__
from lamina.server.counters import Counters

Gauges = Callable[[], dict[str, float]]


class _ServerCollector(Collector):
    """Reads counters and gauges when scraped, so that counting costs an addition."""

    def __init__(self, counters: Counters, gauges: Gauges) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        for name, total in self._counters.totals().items():
            yield CounterMetricFamily(f"lamina_{name}", f"Total {_words(name)}.", total)
        refused = CounterMetricFamily("lamina_refused", "Typed errors sent.", labels=["code"])
        for code, count in self._counters.refused.items():
            refused.add_metric([code], count)
        yield refused
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"lamina_{name}", f"Current {_words(name)}.", value)


def status_app(counters: Counters, gauges: Gauges) -> Starlette:
    """The ASGI application."""
    registry = CollectorRegistry()
    registry.register(_ServerCollector(counters, gauges))

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(generate_latest(registry))

    async def status(_: Request) -> Response:
        values = {**counters.totals(), **gauges(), "refused": dict(counters.refused)}
        return JSONResponse({"version": __version__, **values})

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/status", status),
            Route("/healthz", healthz),
        ]
    )


class StatusServer(uvicorn.Server):
    """uvicorn inside the server's own event loop; signals and the log stay the server's."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app, host=host, port=port, log_config=None, log_level="warning", lifespan="off"
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _words(name: str) -> str:
    return name.replace("_", " ")
