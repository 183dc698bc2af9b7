"""What `lamina bench soak` is asked and what it found."""

from __future__ import annotations

import msgspec

SERVER_KILLED, SERVER_STOPPED = "server killed", "server stopped"
ENGINE_KILLED, ENGINE_STOPPED = "engine killed", "engine stopped"
LANE_ERROR = "lane error"
MAX_RSS_GROWTH = 0.05


class SoakSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How long, how many engines, how often something breaks, and the seed of all choices."""

    minutes: float = 20.0
    engines: int = 8
    faults_per_minute: float = 15.0
    arena_bytes: int = 4 << 20
    warm_up_s: float = 60.0
    """How long a server's memory may grow before it must be flat."""
    seed: int = 0


class ServerLife(msgspec.Struct, kw_only=True):
    """One server from its start to its end; its resident memory after warming up, in bytes."""

    lived_s: float
    rss_least: int = 0
    rss_most: int = 0

    @property
    def rss_growth(self) -> float:
        """0 for a server that did not live long enough to be judged."""
        return self.rss_most / self.rss_least - 1 if self.rss_least else 0.0


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over all engines. `faults` were injected from outside, `errors` are how transfers
    ended that did not end well; `retries` are reconnections and restarted engines."""

    spec: SoakSpec
    operations: dict[str, int]
    faults: dict[str, int]
    retries: dict[str, int]
    errors: dict[str, int]
    wrong_bytes: list[str]
    """What an engine saw in its pages that may not be there; likewise all that may never happen."""
    hangs: list[str]
    leaks: list[str]
    servers: list[ServerLife]
    checked_bytes: int

    @property
    def is_flat(self) -> bool:
        return all(server.rss_growth <= MAX_RSS_GROWTH for server in self.servers)

    @property
    def is_good(self) -> bool:
        return not self.wrong_bytes and not self.hangs and not self.leaks and self.is_flat
