"""Mutations of the vLLM connector.

Their tests are named one by one: each run imports vLLM, which takes longer than all it tests.
"""

from __future__ import annotations

from tests.mutants.mutation import Mutation

HAZARDS = "tests/vllm/test_scheduler_hazards.py"
IDENTITY = "tests/vllm/test_scheduler_identity.py"
STORES = "tests/vllm/test_scheduler_stores.py"
RANKS = "tests/vllm/test_ranks.py"

VLLM = (
    Mutation(
        "vllm-failed-blocks-freed",
        1,
        "blocks of a retrieve that failed are handed out while the server may still write them",
        "engines/vllm/retrieves.py",
        "if retrieve.is_over and not (retrieve.has_failed and is_read):",
        "if (retrieve.is_over or retrieve.state is TransferState.RECOMPUTED) "
        "and not (retrieve.has_failed and is_read):",
        (f"{HAZARDS}::test_retrieve_failed_before_release_and_is_not_over",),
    ),
    Mutation(
        "vllm-unhooked-unwaited",
        2,
        "a full CUDA graph reads pages that have not landed",
        "engines/vllm/worker.py",
        "if self._step_gates is not None and not hooks_fire:",
        "if self._step_gates is not None and hooks_fire is None:",
        (f"{HAZARDS}::test_full_graph_after_an_asynchronous_release",),
    ),
    Mutation(
        "vllm-other-reader-ungated",
        2,
        "a request that finds a retrieve's blocks in vLLM's prefix cache reads them too early",
        "engines/vllm/scheduler.py",
        "        self.retrieves.note_reader(tracked)\n",
        "        if tokens:\n            self.retrieves.note_reader(tracked)\n",
        (f"{HAZARDS}::test_a_sharer_in_a_later_pass_reads_blocks_of_an_aborted_owner",),
    ),
    Mutation(
        "vllm-computed-on-bad-stays-cached",
        4,
        "blocks that were computed on missing KV are found in vLLM's prefix cache",
        "engines/vllm/retrieves.py",
        "                self._held.evict(blocks[first:])\n",
        "                pass\n",
        (f"{HAZARDS}::test_what_sharers_computed_on_bad_blocks_is_not_found",),
    ),
    Mutation(
        "vllm-preempted-token-kept",
        4,
        "a token of a step that read a failed retrieve is delivered after a preemption",
        "engines/vllm/retrieves.py",
        "request.async_tokens_to_discard += request.num_output_placeholders",
        "request.async_tokens_to_discard += 0",
        ("tests/vllm/test_preempted.py",),
    ),
    Mutation(
        "vllm-boundary-never-raises",
        4,
        "after a fault of our own a step runs without its gates, or with blocks that are held",
        "engines/vllm/boundary.py",
        "if held or self._side.has_pending_work:",
        "if held and not self._side.has_pending_work:",
        ("tests/vllm/test_boundary.py",),
    ),
    Mutation(
        "vllm-unconfirmed-stored",
        5,
        "chunks are stored of tokens that a step under way has yet to compute",
        "engines/vllm/stores.py",
        "confirmed = request.num_computed_tokens - request.num_in_flight_tokens",
        "confirmed = request.num_computed_tokens",
        (
            f"{STORES}::test_nothing_of_a_step_that_failed_is_stored",
            f"{STORES}::test_abort_in_the_middle_of_a_prompt",
        ),
    ),
    Mutation(
        "vllm-salt-dropped",
        12,
        "tenants that gave different salts find each other's prompts",
        "engines/vllm/scheduler.py",
        "namespace = msgspec.structs.replace(namespace, salt=request.cache_salt)",
        "namespace = msgspec.structs.replace(namespace)",
        (f"{IDENTITY}::test_salts_have_keys_of_their_own",),
    ),
    Mutation(
        "vllm-last-chunk-of-item",
        12,
        "the chunk in which an image ends is found for another image",
        "engines/vllm/identity.py",
        "for chunk in range(start // chunk_tokens, -(-(start + length) // chunk_tokens)):",
        "for chunk in range(start // chunk_tokens, (start + length) // chunk_tokens):",
        ("tests/vllm/test_identity.py",),
    ),
    Mutation(
        "vllm-changed-adapter-named",
        4,
        "KV of the adapter in memory is named by files that have changed since",
        "engines/vllm/adapters.py",
        "elif known.files != files:",
        "elif False:",
        ("tests/vllm/test_adapters.py",),
    ),
    Mutation(
        "vllm-backend-not-in-namespace",
        12,
        "pages that one attention backend wrote are read by another",
        "engines/vllm/identity.py",
        "            backend=workers.backend,\n",
        "",
        ("tests/vllm/test_identity.py",),
    ),
    Mutation(
        "vllm-adapter-not-in-keys",
        12,
        "KV of one LoRA adapter is found by requests of another",
        "engines/vllm/scheduler.py",
        'namespace = msgspec.structs.replace(namespace, adapter=adapter or "unknown")',
        "namespace = msgspec.structs.replace(namespace)",
        (f"{IDENTITY}::test_adapters_of_other_content_have_other_keys",),
    ),
    Mutation(
        "vllm-unwaited-unnoticed",
        2,
        "a forward that read KV without waiting for it passes for a right one",
        "engines/vllm/worker.py",
        "        failed: list[Retrieve] = gates.settle()\n        unwaited = gates.unwaited()\n",
        "        failed = [retrieve for retrieve in gates.settle() if retrieve.outcome]\n"
        "        unwaited: list[Retrieve] = []\n",
        (f"{HAZARDS}::test_a_forward_that_does_not_wait_for_a_layer",),
    ),
    Mutation(
        "vllm-bad-blocks-reported-once",
        4,
        "vLLM overlooks a report about a request that does not run: it is served bad blocks",
        "engines/vllm/worker.py",
        "            self.invalid_blocks |= self._step.bad_blocks\n",
        "",
        (
            f"{HAZARDS}::test_retrieve_failed_when_its_request_was_promoted_but_had_not_run",
            f"{HAZARDS}::test_bad_blocks_are_reported_until_their_readers_are_gone",
        ),
    ),
    Mutation(
        "vllm-zeroed-blocks-without-ticket",
        7,
        "vLLM zeroes blocks after they were retrieved",
        "engines/vllm/retrieves.py",
        "spec if written.isdisjoint(spec.blocks) else replace(spec, needs_ticket=True)",
        "spec",
        (f"{IDENTITY}::test_a_retrieve_into_blocks_that_the_step_zeroes_needs_a_ticket",),
    ),
    Mutation(
        "vllm-release-unmeasured",
        0,
        "the policy reckons with a guess of how long a release takes",
        "engines/vllm/planning.py",
        "for name in [name for name in self._outside if name in scheduled]:",
        "for name in list[str]():",
        ("tests/vllm/test_scheduler_policy.py::test_how_long_a_release_takes_is_measured",),
    ),
    Mutation(
        "vllm-retrieved-bytes-uncounted",
        10,
        "vLLM's metrics do not show how much was retrieved",
        "engines/vllm/worker.py",
        "self.counts.retrieved_bytes += len(retrieving.spec.blocks) * self._block_bytes",
        "self.counts.retrieved_bytes += 0",
        ("tests/vllm/test_scheduler_counts.py",),
    ),
    Mutation(
        "vllm-failed-on-one-rank-only",
        14,
        "a request runs over KV that one of its ranks never got",
        "engines/vllm/scheduler.py",
        "needed = 1 if self.retrieves.recomputes_elsewhere else self._ranks",
        "needed = self._ranks",
        (f"{RANKS}::test_a_rank_that_cannot_begin",),
    ),
    Mutation(
        "vllm-over-on-one-rank-only",
        14,
        "blocks are handed out while one of several ranks still reads or writes them",
        "engines/vllm/scheduler.py",
        "for number in reports.take(TransferState.OVER, self._ranks):",
        "for number in reports.take(TransferState.OVER, 1):",
        (f"{RANKS}::test_blocks_stay_held_until_both_ranks_have_stored",),
    ),
    Mutation(
        "vllm-replicas-counted-twice",
        14,
        "ranks that keep the same heads have columns of their own",
        "engines/vllm/ranks.py",
        "number = get_pp_group().rank_in_group * shards + rank // replicas",
        "number = get_pp_group().rank_in_group * shards + rank % shards",
        ("tests/vllm/test_shards.py::test_more_ranks_than_heads_keep_the_same_in_pairs",),
    ),
)
