"""Mutations of the release policy and of what it measures: decisions, no guards."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

RELEASE = (
    Mutation(
        "auto-ignores-gated",
        0,
        "a step that waits for slices anyway is thought to be delayed by another's",
        "client/release/auto.py",
        "max(others_end_s, batch.gated_s) if batch.prefilling else others_end_s",
        "others_end_s",
        (
            "tests/client/test_release_auto_busy.py",
            "tests/client/test_release_auto.py",
        ),
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
        "auto-never-joins-a-busy-lane",
        0,
        "a request waits outside though its own step would hide what is ahead of it",
        "client/release/auto.py",
        "if not self.synchronous(0).stall_s",
        "if False",
        (
            "tests/client/test_release_auto_busy.py",
            "tests/client/test_release_auto.py",
        ),
    ),
    Mutation(
        "meters-free-later-than-seen",
        0,
        "a queue that is known to be empty counts as busy",
        "client/release/meters.py",
        "self._free_s = min(now_s, max(self._free_s, job.begun_s) + job.predicted_s)",
        "self._free_s = max(self._free_s, job.begun_s) + job.predicted_s",
        (
            "tests/client/test_release_job_queue.py",
            "tests/client/test_release_meters.py",
        ),
    ),
)
