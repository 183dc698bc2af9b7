"""Mutations of the vLLM connector."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

VLLM = (
    Mutation(
        "vllm-failed-blocks-freed",
        1,
        "blocks of a retrieve that failed are handed out while the server may still write them",
        "engines/vllm/retrieves.py",
        "if retrieve.is_over and not (retrieve.has_failed and is_read):",
        "if (retrieve.is_over or retrieve.state is TransferState.RECOMPUTED) "
        "and not (retrieve.has_failed and is_read):",
    ),
    Mutation(
        "vllm-unhooked-unwaited",
        2,
        "a full CUDA graph reads pages that have not landed",
        "engines/vllm/worker.py",
        "if self._step_gates is not None and not hooks_fire:",
        "if self._step_gates is not None and hooks_fire is None:",
    ),
    Mutation(
        "vllm-other-reader-ungated",
        2,
        "a request that finds a retrieve's blocks in vLLM's prefix cache reads them too early",
        "engines/vllm/scheduler.py",
        "        self.retrieves.note_reader(tracked)\n",
        "        if tokens:\n            self.retrieves.note_reader(tracked)\n",
    ),
    Mutation(
        "vllm-computed-on-bad-stays-cached",
        4,
        "blocks that were computed on missing KV are found in vLLM's prefix cache",
        "engines/vllm/retrieves.py",
        "                self._held.evict(blocks[first:])\n",
        "                pass\n",
    ),
    Mutation(
        "vllm-preempted-token-kept",
        4,
        "a token of a step that read a failed retrieve is delivered after a preemption",
        "engines/vllm/retrieves.py",
        "request.async_tokens_to_discard += request.num_output_placeholders",
        "request.async_tokens_to_discard += 0",
    ),
    Mutation(
        "vllm-boundary-never-raises",
        4,
        "after a fault of our own a step runs without its gates, or with blocks that are held",
        "engines/vllm/boundary.py",
        "if held or self._side.has_pending_work:",
        "if held and not self._side.has_pending_work:",
    ),
    Mutation(
        "vllm-unconfirmed-stored",
        5,
        "chunks are stored of tokens that a step under way has yet to compute",
        "engines/vllm/stores.py",
        "confirmed = request.num_computed_tokens - request.num_in_flight_tokens",
        "confirmed = request.num_computed_tokens",
    ),
    Mutation(
        "vllm-salt-dropped",
        12,
        "tenants that gave different salts find each other's prompts",
        "engines/vllm/scheduler.py",
        "namespace = msgspec.structs.replace(namespace, salt=request.cache_salt)",
        "namespace = msgspec.structs.replace(namespace)",
    ),
    Mutation(
        "vllm-last-chunk-of-item",
        12,
        "the chunk in which an image ends is found for another image",
        "engines/vllm/identity.py",
        "for chunk in range(start // chunk_tokens, -(-(start + length) // chunk_tokens)):",
        "for chunk in range(start // chunk_tokens, (start + length) // chunk_tokens):",
    ),
    Mutation(
        "vllm-changed-adapter-named",
        4,
        "KV of the adapter in memory is named by files that have changed since",
        "engines/vllm/adapters.py",
        "elif known.files != files:",
        "elif False:",
    ),
)
