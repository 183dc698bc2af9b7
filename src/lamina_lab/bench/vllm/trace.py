"""Watches vLLM's scheduler and its connector, whichever it is: when does a request pass what?

vLLM makes its scheduler by the name of `traced_scheduler` (`scheduler_cls`), in the engine core's
process. It is the scheduler that vLLM would have made, with some of its methods wrapped: nothing is
added to Lamina's own path, and all arms are watched alike, for some microseconds a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lamina_lab.bench.vllm.phases import Passage

TRACE_PATH = "LAMINA_BENCH_TRACE"
"""The environment variable with the file that passages are appended to, a line each."""
TRACED = f"{__name__}.traced_scheduler"


def traced_scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """vLLM's own scheduler, watched."""
    vllm_config.scheduler_config.scheduler_cls = None  # that is: what vLLM would choose
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config, **arguments
    )
    Trace(Path(os.environ[TRACE_PATH])).watch(scheduler)
    return scheduler


class Trace:
    """On the scheduler's thread. A passage is written once its request has ended."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._passages: dict[str, Passage] = {}
        self._unanswered_s: dict[str, float] = {}
        self._is_asynchronous: dict[str, bool] = {}
        self._new: list[Passage] = []
        """Queued since the last scheduling pass."""
        self._retrieves: dict[int, str] = {}
        """Lamina's retrieves by number: whose they are."""

    def watch(self, scheduler: Any) -> None:
        """Wrap its methods, and its connector's."""
        connector = scheduler.connector
        add, schedule, update = (
            scheduler.add_request,
            scheduler.schedule,
            scheduler.update_from_output,
        )

        def add_request(request: Any) -> None:
            self._queued(request.request_id, connector is not None)
            add(request)

        def schedule_step(*arguments: Any, **options: Any) -> Any:
            self._passing()
            output = schedule(*arguments, **options)
            self._scheduled(output.num_scheduled_tokens)
            return output

        def update_from_output(*arguments: Any, **options: Any) -> Any:
            outputs = update(*arguments, **options)
            for of_client in outputs.values():
                for output in of_client.outputs:
                    self._computed(output)
            return outputs

        scheduler.add_request = add_request
        scheduler.schedule = schedule_step
        scheduler.update_from_output = update_from_output
        if connector is not None:
            self._watch_connector(connector)

    def _watch_connector(self, connector: Any) -> None:
        match, allocate = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        build, update = connector.build_connector_meta, connector.update_connector_output

        def get_num_new_matched_tokens(request: Any, computed: int) -> Any:
            asked_s = self._clock()
            answer = match(request, computed)
            self._asked(request.request_id, asked_s, answer)
            return answer

        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
            self._allocated(request.request_id, tokens)
            allocate(request, blocks, tokens)

        def build_connector_meta(output: Any) -> Any:
            step = build(output)
            for retrieve in getattr(step, "retrieves", ()):
                self._retrieves[retrieve.number] = retrieve.request
            return step

        def update_connector_output(output: Any) -> None:
            self._told(output)
            update(output)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.update_state_after_alloc = update_state_after_alloc
        connector.build_connector_meta = build_connector_meta
        connector.update_connector_output = update_connector_output

    def _queued(self, name: str, has_connector: bool) -> None:
        passage = Passage(request=name, queued_s=self._clock(), has_connector=has_connector)
        self._passages[name] = passage
        self._new.append(passage)

    def _passing(self) -> None:
        if self._new:
            now_s = self._clock()
            for passage in self._new:
                passage.passed_s = now_s
            self._new.clear()

    def _asked(self, name: str, asked_s: float, answer: tuple[int | None, bool]) -> None:
        passage, now_s = self._passages.get(name), self._clock()
        if passage is None or passage.allocated_s is not None:
            return
        passage.note_lookup(asked_s, now_s, self._unanswered_s.pop(name, None))
        tokens, self._is_asynchronous[name] = answer
        if tokens is None:
            self._unanswered_s[name] = now_s

    def _allocated(self, name: str, tokens: int) -> None:
        passage = self._passages.get(name)
        if passage is not None and passage.allocated_s is None:
            passage.allocated_s = self._clock()
            passage.retrieved_tokens = tokens
            passage.is_asynchronous = self._is_asynchronous.get(name, False)

    def _told(self, output: Any) -> None:
        for name in output.finished_recving or ():
            passage = self._passages.get(name)
            if passage is not None and passage.released_s is None:
                passage.released_s = self._clock()
        for account in getattr(output.kv_connector_worker_meta, "accounts", ()):
            passage = self._passages.get(self._retrieves.pop(account.number, ""))
            if passage is not None:
                passage.landed_s = account.end_s

    def _scheduled(self, scheduled: dict[str, int]) -> None:
        for name in scheduled:
            passage = self._passages.get(name)
            if passage is not None and passage.scheduled_s is None:
                passage.scheduled_s = self._clock()

    def _computed(self, output: Any) -> None:
        passage = self._passages.get(output.request_id)
        if passage is None:
            return
        if output.new_token_ids and passage.first_token_s is None:
            passage.first_token_s = self._clock()
        if output.finish_reason is not None:
            self._end(passage)

    def _end(self, passage: Passage) -> None:
        name = passage.request
        del self._passages[name]
        self._unanswered_s.pop(name, None)
        self._is_asynchronous.pop(name, None)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(passage) + b"\n")
