"""Mutations of the release policy and of what it measures: decisions, no guards."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

RELEASE = (
    Mutation(
        "auto-trusts-quick-steps",
        0,
        "a hit is cut short because a few steps seemed quick, and its end is computed for long",
        "client/release/auto.py",
        "if _Outlook(query, speed, slowest_s).agrees(shorter):",
        "if True:",
        ("tests/client/test_release_auto.py", "tests/client/test_release_forecast.py"),
    ),
    Mutation(
        "auto-overtakes",
        0,
        "a step waits for a retrieve that went ahead of those who wait outside",
        "client/release/auto.py",
        "if query.batch.retrieving:",
        "if False:",
        ("tests/client/test_release_auto.py",),
    ),
    Mutation(
        "auto-without-caution",
        0,
        "tokens are computed that would have been there sooner by a retrieve",
        "client/release/auto.py",
        "CAUTION = 1.1\n",
        "CAUTION = 1.0\n",
        (
            "tests/client/test_release_auto_busy.py",
            "tests/client/test_release_auto.py",
        ),
    ),
    Mutation(
        "meters-free-later-than-seen",
        0,
        "a queue that is known to be empty counts as busy",
        "client/release/jobs.py",
        "self._free_s = min(now_s, max(self._free_s, job.begun_s) + job.predicted_s)",
        "self._free_s = max(self._free_s, job.begun_s) + job.predicted_s",
        (
            "tests/client/test_release_job_queue.py",
            "tests/client/test_release_meters.py",
        ),
    ),
    Mutation(
        "release-measured-while-busy",
        0,
        "steps of others count as time that every release takes",
        "client/release/released.py",
        "if awaited.idle_since_s <= awaited.release_landed_s <= awaited.scheduled_s:",
        "if awaited.release_landed_s <= awaited.scheduled_s:",
        ("tests/client/test_release_released.py",),
    ),
)
