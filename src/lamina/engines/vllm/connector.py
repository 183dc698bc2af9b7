"""What vLLM calls: a thin class over the scheduler's and the worker's side.

Works with vLLM 0.26 to 0.32; where the interface changed in between, the docstring says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from lamina.client import Client
from lamina.content import wall_clock_ns
from lamina.devices.host import HostWorkerDevice
from lamina.engines.vllm.adapters import Adapters
from lamina.engines.vllm.began import beginnings
from lamina.engines.vllm.boundary import Boundary
from lamina.engines.vllm.config import (
    ConnectorSettings,
    check_ranks,
    check_supported,
    check_transfer,
    settings_for,
)
from lamina.engines.vllm.epochs import Epochs
from lamina.engines.vllm.identity import Identity
from lamina.engines.vllm.kinds import check_groups, check_layers, check_model
from lamina.engines.vllm.layout import layout_of
from lamina.engines.vllm.loaded import LoadedWeights, model_of_caller, scales_of
from lamina.engines.vllm.logs import join_vllm, printable_name, tell_start
from lamina.engines.vllm.messages import StepMetadata, StepReport, WorkerDescription
from lamina.engines.vllm.ranks import shard_of
from lamina.engines.vllm.scheduler import SchedulerSide
from lamina.engines.vllm.speculation import check_speculation
from lamina.engines.vllm.stats import LaminaPromMetrics, LaminaStats, take
from lamina.engines.vllm.weights import Weights
from lamina.engines.vllm.worker import WorkerSide, device_of, kind_of
from lamina.errors import ErrorCode, LaminaError, RequestRefusedError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_DEGRADE = (
    ErrorCode.VERSION,
    ErrorCode.STOPPING,
    ErrorCode.FORBIDDEN,
    ErrorCode.BUSY,
    ErrorCode.INTERNAL,
)
"""Refusals that are the server's affair: the engine serves without the cache and tries again. Any
other is a setting of the engine's own and stops it at its start."""


START_WAIT_S = 0.1
"""So long an engine's start may wait for the worker's description and for what the weights are:
small models are known by then, and their first request is stored."""
_HANDS_OVER_MANAGER = hasattr(KVConnectorBase_V1, "bind_kv_cache_manager")


class LaminaConnector(KVConnectorBase_V1):
    """`kv_connector` for vLLM; see `docs/vllm.md`."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None is required; but vLLM asks early, before it stops at models that it says are wrong
        in another way."""
        join_vllm()
        try:
            check_model(vllm_config.model_config)
        except LaminaError as error:
            log.error("Lamina cannot serve this engine: %s", error)
            raise
        return None

    if hasattr(KVConnectorBase_V1, "_cache_hit_source"):  # from 0.32 on: a source for its metrics
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm()
        self._config = vllm_config
        self._scheduler: SchedulerSide | None = None
        self._boundary: Boundary | None = None
        self._worker: WorkerSide | None = None
        self._stream_of: Any = None
        self._report = StepReport()
        try:
            self._settings = self._checked(kv_cache_config)
        except LaminaError as error:
            log.error("Lamina cannot serve this engine: %s", error)
            beginnings.take()  # this engine ends here
            raise
        if role is KVConnectorRole.SCHEDULER:
            self._make_scheduler(kv_cache_config.num_blocks)
        else:
            beginnings.worker_made()
            self._model = model_of_caller()

    def _checked(self, kv_cache_config: Any) -> ConnectorSettings:
        """Raise `LaminaError` for an engine that is not proven to get right tokens."""
        config = self._config
        check_model(config.model_config)
        check_speculation(config, _HANDS_OVER_MANAGER)
        check_groups(kv_cache_config.kv_cache_groups)
        check_supported(config)
        check_transfer(config.kv_transfer_config)
        whole = get_current_vllm_config_or_none()  # of a MultiConnector we are given a part
        if whole is not None and whole.kv_transfer_config is not None:
            check_transfer(whole.kv_transfer_config)
        settings = ConnectorSettings.parse(config.kv_transfer_config.kv_connector_extra_config)
        check_ranks(config.parallel_config, settings, _HANDS_OVER_MANAGER)
        return settings_for(config.parallel_config, settings)

    def _make_scheduler(self, num_blocks: int) -> None:
        config, made_ns = self._config, wall_clock_ns()
        weights = Weights(config, self._settings.model_id, beginnings.take())
        weights.begin()
        adapters = Adapters(self._engine_id, made_ns)
        self._scheduler = SchedulerSide(
            self._settings,
            self._client("vLLM scheduler", HostWorkerDevice()),
            Identity(config, vllm.__version__, weights, adapters, Epochs(self._engine_id)),
            config.cache_config.block_size,
            num_blocks,
            config.scheduler_config.max_num_batched_tokens,
            config.parallel_config.world_size,
        )
        self._boundary = Boundary(self._scheduler)
        self._connect(self._scheduler.client)
        until_s = time.monotonic() + START_WAIT_S
        if self._scheduler.client.is_usable:
            tell_start(self._scheduler.client, self._settings)
            self._scheduler.client.wait_for_workers(config.parallel_config.world_size, START_WAIT_S)
            weights.wait(until_s - time.monotonic())
            self._scheduler.find_identity()

    # Worker's side

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Export the KV memory and register it with the server."""
        try:
            layout = layout_of(
                kv_caches,
                self._kv_cache_config.num_blocks,
                self._config.cache_config.block_size,
                self._settings.chunk_tokens,
            )
            layers = self._config.compilation_config.static_forward_context
            check_layers(kv_caches, layers)
            device, weights = device_of(kv_caches), LoadedWeights(self._model)
            description = WorkerDescription(
                geometry_digest=layout.geometry.digest,
                layers=len(layout.geometry.layers),
                token_bytes=layout.token_bytes,
                layout=layout.signature,
                backend=f"{_backend_names(layers)} on {kind_of(kv_caches)}",
                scales=scales_of(layers, kv_caches),
                watches_weights=weights.are_watched,
                shard=shard_of(self._config, layers, kv_caches),
            )
            client = self._client("vLLM worker", device)
            client.register(
                layout.geometry,
                layout.page_map,
                layout.allocations,
                description.encode(),
                description.shard,
            )
        except LaminaError as error:
            log.error("Lamina cannot serve this engine: %s", error)
            raise
        self._worker = WorkerSide(client, device, layout, weights, _HANDS_OVER_MANAGER)
        if device.name != "host":
            import torch

            self._stream_of = lambda: torch.cuda.current_stream().cuda_stream
        self._connect(client)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Everything that must precede the forward begins here: from 0.32 on, `start_load_kv`
        may come after it."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._worker is not None:
            stream = self._stream_of() if self._stream_of is not None else None
            self._worker.begin_step(connector_metadata, stream)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """In a step that has gates this comes before the forward (the scheduler's side sees to
        that, where vLLM lets it choose) and tells whether layer hooks will fire."""
        if self._worker is not None:
            mode = getattr(forward_context, "cudagraph_runtime_mode", None)
            hooks_fire = (
                forward_context.attn_metadata is not None and mode is not CUDAGraphMode.FULL
            )
            self._worker.before_forward(hooks_fire)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: chunks are stored after the step that completed them was confirmed."""

    def wait_for_save(self) -> None:
        """Nothing: blocks are held until they are copied."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Settle the step. From 0.32 on called through `get_transfer_results`."""
        if self._worker is None:
            return None, None
        released, self._report = self._worker.end_step()
        return None, released or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.invalid_blocks if self._worker is not None else set()

    def build_connector_worker_meta(self) -> StepReport | None:
        report, self._report = self._report, StepReport()
        return report or None

    # Scheduler's side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Nothing: what vLLM brings may be another connector's. The worker's description comes
        over Lamina's own connection."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """From 0.32 on."""
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._scheduler is not None
        self._scheduler.bind_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Its resets are seen from here on: vLLM tells a connector only of those that it asks to
        forget, and a change of weights may come without."""
        side, boundary = self._guarded()
        side.bind_pool(gpu_block_pool)
        reset = gpu_block_pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            boundary.end(self._give_up_stores)
            done = bool(reset())
            if done:
                boundary.end(lambda: side.reset(forget=False))
            return done

        gpu_block_pool.reset_prefix_cache = reset_prefix_cache

    def on_new_request(self, request: Any) -> None:
        side, boundary = self._guarded()
        boundary.ask(request, lambda: side.new_request(request), None)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        side, boundary = self._guarded()
        no_hit: tuple[int | None, bool] = (0, False)
        return boundary.ask(
            request, lambda: side.matched_tokens(request, num_computed_tokens), no_hit
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side, boundary = self._guarded()
        if num_external_tokens:  # vLLM counts on them from here on
            side.allocated(request, blocks, num_external_tokens)
        else:
            boundary.step(lambda: side.allocated(request, blocks, 0), None)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        side, boundary = self._guarded()
        step = boundary.step(lambda: side.build_step(scheduler_output), StepMetadata())
        if step.retrieves and (worker := self._worker_here()) is not None:
            worker.begin_early(step)
        if step.gates and hasattr(scheduler_output, "has_sync_kv_loads"):
            scheduler_output.has_sync_kv_loads = True
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        side, boundary = self._guarded()
        released = connector_output.finished_recving or ()
        report = connector_output.kv_connector_worker_meta
        boundary.step(lambda: side.step_done(released, report), None)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the free: what is needed is held in the pool."""
        side, boundary = self._guarded()
        boundary.end(lambda: side.finished(request))
        return False, None

    def has_pending_push_work(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_pending_work

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a later miss, nothing more."""
        return False

    def reset_cache(self) -> bool:
        side, boundary = self._guarded()
        boundary.end(self._give_up_stores)
        side.reset(forget=True)
        return True

    def _give_up_stores(self) -> None:
        """A server that does not answer must not keep blocks from a reset. Ranks in processes of
        their own learn of it with the next step: the reset after that one gets the blocks."""
        assert self._scheduler is not None
        self._scheduler.stores.give_up_queued()
        if (worker := self._worker_here()) is not None:
            for number in worker.give_up_stores():
                self._scheduler.stores.end(number)
        else:
            self._scheduler.stores.give_up_on_ranks()

    def _guarded(self) -> tuple[SchedulerSide, Boundary]:
        assert self._scheduler is not None
        assert self._boundary is not None
        return self._scheduler, self._boundary

    # Both

    def get_kv_connector_stats(self) -> LaminaStats | None:
        side = self._scheduler or self._worker
        return take(side.counts) if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LaminaStats:
        return LaminaStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> LaminaPromMetrics:
        return LaminaPromMetrics(*arguments)

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.client.close()

    def _worker_here(self) -> WorkerSide | None:
        """The worker's side of this engine, if vLLM runs it in this process."""
        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        for worker in getattr(group, "_connectors", [group]):  # a MultiConnector's, or itself
            if isinstance(worker, LaminaConnector) and worker._engine_id == self._engine_id:
                return worker._worker
        return None

    @property
    def _engine_id(self) -> Any:
        return self._config.kv_transfer_config.engine_id

    def _client(self, label: str, device: Any) -> Client:
        model = printable_name(self._config.model_config.model)
        return Client(self._settings, device, label, engine=self._engine_id, model=model)

    def _connect(self, client: Client) -> None:
        """Connect at the start; without a server the engine serves all the same."""
        try:
            client.try_connect()
        except RequestRefusedError as error:
            if error.code not in _DEGRADE:
                log.error("Lamina cannot serve this engine: %s", error)
                raise
            client.note_trouble(str(error))


def _backend_names(layers: Mapping[str, Any]) -> str:
    """The attention backends of the loaded layers."""
    backends = {
        layer.attn_backend.get_name() for layer in layers.values() if hasattr(layer, "attn_backend")
    }
    return ",".join(sorted(backends))
