"""When the link and the engine are free: jobs that end before or after they were predicted to."""

from __future__ import annotations

import pytest

from lamina.client.release.jobs import JobQueue


def test_a_job_that_ends_early_leaves_the_queue_free_at_once() -> None:
    queue = JobQueue()
    queue.begin("early", 0.0, 10.0)
    queue.end("early", 1.0)
    assert queue.busy_s(1.0) == 0
    queue.begin("next", 2.0, 3.0)
    assert queue.busy_s(2.0) == pytest.approx(3.0)


def test_the_next_job_has_been_worked_on_since_the_predicted_end_of_one_seen_late() -> None:
    queue = JobQueue()
    queue.begin("seen late", 0.0, 1.0)
    queue.begin("next", 0.0, 1.0)
    queue.end("seen late", 1.75)
    assert queue.busy_s(1.75) == pytest.approx(0.25)
