"""What each field of vLLM's configuration is to the identity of KV: 0.26.0's and 0.32.0's.

A field that is in no table, of a newer vLLM, counts as one in the key. Where in doubt a field is in
the key: a chunk too little is shared then, never a wrong one.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Treatment(enum.Enum):
    KEY = "in the key"
    """Another value makes other KV, or other meanings of a page's bytes, or may do so."""
    NEUTRAL = "does not change KV"
    """No more than rounding does, or it is told by something else that is in the key."""
    REFUSED = "refused"
    """The connector does not start with the value that is named; any other value is in the key."""


class Row(NamedTuple):
    treatment: Treatment
    why: str


def _key(why: str, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, Row(Treatment.KEY, why))


def _neutral(why: str, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, Row(Treatment.NEUTRAL, why))


def _refused(why: str, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, Row(Treatment.REFUSED, why))


# fmt: off
FIELDS: dict[str, dict[str, Row]] = {
    "VllmConfig":
        _key("field by field: see its class",
             "model_config", "cache_config", "parallel_config", "scheduler_config",
             "device_config", "load_config", "attention_config", "mamba_config", "kernel_config",
             "lora_config", "compilation_config", "ec_manager_config", "speculative_config")
        | _key("platforms and models read settings of their own there", "additional_config")
        | _refused("set: a canvas attends to its later tokens too", "diffusion_config")
        | _refused("set: encoder outputs of other engines, which the key does not name",
                   "ec_transfer_config")
        | _neutral("no field of its class changes KV",
                   "offload_config", "aux_output_config", "engram_config", "watermark_config",
                   "structured_outputs_config", "observability_config", "logging_config",
                   "profiler_config", "kv_events_config", "reasoning_config")
        | _neutral("made from the model's quantization fields, hf_config and files",
                   "quant_config")
        | _neutral("about us; what it may not be is refused: see its class", "kv_transfer_config")
        | _neutral("new weights are seen in memory, or begin an epoch when vLLM's caches are reset",
                   "weight_transfer_config")
        | _neutral("differs from start to start", "instance_id")
        | _neutral("how the same maths is compiled and captured",
                   "optimization_level", "performance_mode")
        | _neutral("when an engine stops", "shutdown_timeout"),

    "ModelConfig":
        _key("the model: layers, widths, rope, its quantization; overrides are applied to it",
             "hf_config", "hf_text_config")
        | _key("precision of all that is computed", "dtype", "override_attention_dtype")
        | _key("LongRoPE, Llama 4's temperature tuning, MiniMax M2 and others read it",
               "max_model_len")
        | _key("how weights are made smaller, and activations",
               "quantization", "quantization_config")
        | _key("adapters for pooling may change the model", "runner", "convert")
        | _key("which code computes the model",
               "model_impl", "model_class_overrides", "trust_remote_code", "code_revision")
        | _key("takes the window out of the model", "disable_sliding_window")
        | _refused("names a quantization_config_file: no content of it is in the key",
                   "hf_overrides")
        | _refused("true: vLLM discards KV without telling us", "enable_sleep_mode")
        | _key("field by field: see its class", "multimodal_config")
        | _neutral("weights are told by content, not by name", "model", "revision")
        | _neutral("weights elsewhere count by lamina.model_id only", "model_weights")
        | _neutral("random weights depend on it, and are told by it", "seed")
        | _neutral("keys hold token ids",
                   "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init",
                   "generation_config", "override_generation_config", "io_processor_plugin",
                   "renderer_num_workers", "enable_trace_replay")
        | _neutral("what it finds is in hf_config", "hf_config_path", "config_format", "hf_token")
        | _neutral("requests with embeddings go without the cache", "enable_prompt_embeds")
        | _neutral("media are told by content",
                   "allowed_local_media_path", "allowed_media_domains")
        | _neutral("after the last layer that has KV",
                   "logits_processors", "max_logprobs", "logprobs_mode", "use_fp64_gumbel",
                   "return_sampling_mask", "pooler_config", "enable_return_routed_experts",
                   "word_embeddings_untied_by_checkpoint")
        | _neutral("how the same maths is run", "enforce_eager", "disable_cascade_attn")
        | _neutral("only with sleep mode, which is refused",
                   "sleep_mode_backend", "sleep_preserve_parameter_names",
                   "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend")
        | _neutral("where memory comes from", "enable_cumem_allocator")
        | _neutral("only lets a value pass", "allow_deprecated_quantization")
        | _neutral("of a drafter or a part of a model, not of the engine's model",
                   "spec_target_max_model_len", "is_submodel_config")
        | _neutral("a name for users", "served_model_name"),

    "MultiModalConfig":
        _key("what an item is decoded and processed to; its hash may leave it out",
             "media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize")
        | _key("which parts of a model are there and which attend both ways",
               "language_model_only", "mm_encoder_only", "limit_per_prompt")
        | _key("which of a video's tokens are left out",
               "video_pruning_rate", "video_pruning_method")
        | _refused("'fp8': scales follow the items encoded before", "mm_encoder_attn_dtype")
        | _refused("set: no content of the file is in the key", "mm_encoder_fp8_scale_path")
        | _neutral("only written", "mm_encoder_fp8_scale_save_path",
                   "mm_encoder_fp8_scale_save_margin")
        | _neutral("how the same maths is run", "mm_encoder_tp_mode", "mm_encoder_attn_backend")
        | _neutral("other algorithms never give equal names", "mm_hasher_algorithm")
        | _neutral("embeddings are told by content, or by the name that a client gives",
                   "enable_mm_embeds", "allow_missing_mm_embeddings")
        | _neutral("how items travel and are kept",
                   "mm_processor_cache_gb", "mm_processor_cache_type",
                   "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb",
                   "skip_mm_profiling")
        | _neutral("keys hold token ids", "interleave_mm_strings"),

    "CacheConfig":
        _refused("'*_per_token_head': a layer's first pass overwrites the scales that are loaded",
                 "cache_dtype")
        | _key("in which layers KV is not rounded to it", "kv_cache_dtype_skip_layers")
        | _key("which tokens have KV", "sliding_window", "swa_bounded_replay")
        | _key("what a state-space layer keeps of its states",
               "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size",
               "mamba_cache_mode", "use_replayssm", "replayssm_buffer_len", "use_kda_recoverssm")
        | _refused("true: KV scales come from whatever batch is first", "calculate_kv_scales")
        | _refused("true: layers that share KV skip tokens, which is not proven",
                   "kv_sharing_fast_prefill")
        | _refused("false: nothing can be given back", "enable_prefix_caching")
        | _neutral("in the geometry or the layout",
                   "block_size", "user_specified_block_size", "_block_size_resolved",
                   "effective_attention_block_size", "kv_cache_layout",
                   "user_specified_mamba_block_size", "mamba_page_size_padded",
                   "skip_page_size_padded")
        | _neutral("how much KV there is room for",
                   "gpu_memory_utilization", "num_gpu_blocks_override", "num_gpu_blocks",
                   "num_cpu_blocks", "kv_cache_memory_bytes", "kv_cache_size_tokens",
                   "kv_cache_max_concurrency")
        | _neutral("how vLLM's own cache names and keeps blocks",
                   "prefix_caching_hash_algo", "prefix_match_unit", "hash_block_size",
                   "cache_hit_alignment_tokens", "prefix_cache_retention_interval",
                   "enable_mamba_shared_prefix_checkpoint")
        | _neutral("takes another connector than us", "kv_offloading_size", "kv_offloading_backend")
        | _neutral("such a model has no KV", "is_attention_free"),

    "ParallelConfig":
        _refused("over 1: not supported yet",
                 "decode_context_parallel_size", "prefill_context_parallel_size")
        | _refused("true: not proven yet", "enable_dbo")
        | _neutral("shards are counted in the key: an MLA model has one on any number of ranks",
                   "tensor_parallel_size", "pipeline_parallel_size")
        | _key("some quantize what they send", "all2all_backend")
        | _key("code of others that computes", "worker_cls", "worker_extension_cls")
        | _neutral("which rank has which experts: the same sums in another order",
                   "enable_expert_parallel", "enable_eplb", "eplb_config", "is_moe_model",
                   "expert_placement_strategy", "enable_ep_weight_filter", "enable_elastic_ep",
                   "elastic_ep_max_dp_size")
        | _neutral("ranks, addresses and ports, which differ from engine to engine",
                   "data_parallel_rank", "data_parallel_rank_local", "data_parallel_index",
                   "data_parallel_master_ip", "data_parallel_rpc_port", "data_parallel_master_port",
                   "_data_parallel_master_port_list", "_coord_store_port", "master_addr",
                   "master_port", "node_rank", "nnodes", "rank", "world_size",
                   "_api_process_count", "_api_process_rank")
        | _neutral("which engine serves a request",
                   "data_parallel_size", "data_parallel_size_local", "data_parallel_backend",
                   "data_parallel_external_lb", "data_parallel_hybrid_lb", "dp_sync_interval",
                   "disable_nccl_for_dp_synchronization")
        | _neutral("how workers are started, placed and talked to",
                   "distributed_executor_backend", "ray_workers_use_nsight", "ray_runtime_env",
                   "placement_group", "numa_bind", "numa_bind_nodes", "numa_bind_cpus",
                   "assigned_physical_gpu_ids", "max_parallel_loading_workers",
                   "distributed_timeout_seconds", "cpu_distributed_timeout_seconds",
                   "enable_shm_tensor_arena", "enable_fault_tolerance", "fault_tolerance_config")
        | _neutral("how a batch is cut", "ubatch_size",
                   "dbo_decode_token_threshold", "dbo_prefill_token_threshold")
        | _neutral("how ranks add up and sample: the same sums in another order",
                   "disable_custom_all_reduce", "enable_hc_sp", "enable_batch_sharded_sampling")
        | _neutral("only with context parallelism, which is refused",
                   "dcp_kv_cache_interleave_size", "dcp_comm_backend", "dcp_q_replicate",
                   "cp_kv_cache_interleave_size", "_allow_auto_resolve_cp_interleave_size")
        | _neutral("only for a drafter", "sd_worker_cls"),

    "SchedulerConfig":
        _key("models whose images attend both ways need them in one step",
             "disable_chunked_mm_input")
        | _key("code of others that may drop tokens", "scheduler_cls")
        | _neutral("what is computed when, and in which batch",
                   "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs",
                   "max_num_active_seqs", "max_num_partial_prefills", "max_long_partial_prefills",
                   "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
                   "max_num_queued_reqs", "max_num_queued_tokens", "enable_chunked_prefill",
                   "max_num_encoder_input_tokens", "encoder_cache_size", "policy",
                   "scheduler_reserve_full_isl", "watermark", "prefill_schedule_interval",
                   "async_scheduling", "stream_interval")
        | _neutral("which blocks vLLM keeps: the groups are in the geometry",
                   "disable_hybrid_kv_cache_manager")
        | _neutral("the model's fields say it", "runner_type", "is_multimodal_model"),

    "DeviceConfig":
        _key("platforms have kernels of their own", "device_type")
        | _neutral("which device of the type", "device"),

    "LoadConfig":
        _key("which of the files are the weights, or where else they are",
             "load_format", "ignore_patterns", "model_loader_extra_config")
        | _neutral("how files are read, not what is in them",
                   "download_dir", "safetensors_load_strategy", "safetensors_prefetch_num_threads",
                   "safetensors_prefetch_block_size", "device", "use_tqdm_on_load",
                   "pt_load_map_location"),

    "AttentionConfig":
        _key("whether queries are rounded to FP8, or FP8 KV is read as it is",
             "flash_attn_version", "use_trtllm_attention", "disable_flashinfer_q_quantization",
             "mla_prefill_backend", "use_prefill_query_quantization", "sparse_mla_force_mqa")
        | _key("which tokens sparse attention selects, and at what precision",
               "use_fp4_indexer_cache", "indexer_kv_dtype", "indexer_sparse_logits",
               "minimax_m3_msa_decode_backend")
        | _key("later tokens are attended to", "use_non_causal")
        | _refused("set: KV lies in host memory too", "hisparse_config")
        | _neutral("the backends of the loaded layers are in the key",
                   "backend", "backend_per_kind")
        | _neutral("how the same sums are split",
                   "flash_attn_max_num_splits_for_cuda_graph", "tq_max_kv_splits_for_cuda_graph",
                   "tokenspeed_mla_min_split_kv", "sparse_mla_prefill_workspace_factor",
                   "use_prefill_decode_attention", "flex_attn_block_m", "flex_attn_block_n",
                   "flex_attn_q_block_size", "flex_attn_kv_block_size"),

    "MambaConfig":
        _key("how states are rounded, at random",
             "enable_stochastic_rounding", "stochastic_rounding_philox_rounds")
        | _neutral("kernels for the same maths", "backend", "ssu_algorithm"),

    "KernelConfig":
        _key("some round activations or weights again, others do not",
             "moe_backend", "linear_backend", "linear_backend_per_quant")
        | _key("may select other experts or tokens where values are close",
               "enable_bf16x3_router_gemm", "sparse_indexer_topk_backend")
        | _neutral("kernels for the same maths", "ir_op_priority")
        | _neutral("before the first request",
                   "enable_flashinfer_autotune", "enable_rocm_segmented_attn_autotune",
                   "enable_cutedsl_warmup", "enable_jit_warmup"),

    "LoRAConfig":
        _key("precision of an adapter", "lora_dtype")
        | _key("which of an adapter's weights are used, and how they are read",
               "target_modules", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
               "enable_moe_shared_loras")
        | _neutral("how many adapters there is room for",
                   "max_lora_rank", "max_loras", "max_cpu_loras", "max_lora_cls_labels")
        | _neutral("how the same maths is run", "fully_sharded_loras", "specialize_active_lora")
        | _neutral("a request says which adapter it got", "default_mm_loras"),

    "CompilationConfig":
        _key("passes of others may change the maths", "inductor_passes")
        | _neutral("how the same maths is compiled",
                   "mode", "backend", "custom_ops", "ir_enable_torch_wrap", "splitting_ops",
                   "compile_mm_encoder", "compile_sizes", "compile_ranges_endpoints",
                   "inductor_compile_config", "use_inductor_graph_partition", "pass_config",
                   "dynamic_shapes_config", "fast_moe_cold_start", "enabled_custom_ops",
                   "disabled_custom_ops")
        | _neutral("how it is captured",
                   "cudagraph_mm_encoder", "encoder_cudagraph_token_budgets",
                   "encoder_cudagraph_max_vision_items_per_batch",
                   "encoder_cudagraph_max_frames_per_batch", "cudagraph_decoder_replay",
                   "decoder_replay_cudagraph_capture_sizes", "decoder_replay_trim_threshold",
                   "cudagraph_mode", "cudagraph_num_of_warmups", "cudagraph_capture_sizes",
                   "cudagraph_copy_inputs", "cudagraph_specialize_lora",
                   "max_cudagraph_capture_size")
        | _neutral("files, times, and what vLLM notes down meanwhile",
                   "debug_dump_path", "cache_dir", "compile_cache_save_format", "local_cache_dir",
                   "traced_files", "compilation_time", "encoder_compilation_time",
                   "static_forward_context", "static_all_moe_layers"),

    "SpeculativeConfig":
        _neutral("who proposes; the model computes and keeps the same KV of what it accepts. All "
                 "but 'ngram', which has no KV of its own, is refused",
                 "method", "model")
        | _neutral("how many tokens are computed at once, and which are proposed",
                   "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        | _neutral("the same by batch, which is refused", "num_speculative_tokens_per_batch_size")
        | _neutral("which proposals are accepted: keys hold the tokens that were. All but "
                   "'standard' is refused",
                   "rejection_sample_method")
        | _neutral("the engine's own again", "target_model_config", "target_parallel_config")
        | _neutral("of a drafter that is a model, which is refused",
                   "enforce_eager", "draft_tensor_parallel_size", "tensor_parallel_size",
                   "quantization", "moe_backend", "attention_backend", "kv_cache_dtype",
                   "max_model_len", "revision", "code_revision", "index_share_for_mtp_iteration",
                   "disable_padded_drafter_batch", "disable_eagle_block_drop",
                   "use_local_argmax_reduction", "use_heterogeneous_vocab", "parallel_drafting",
                   "draft_model_config", "draft_parallel_config", "draft_load_config",
                   "draft_sample_method", "dspark_draft_topk", "enable_adaptive_verification")
        | _neutral("of a method that is refused",
                   "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
                   "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
                   "synthetic_acceptance_rates", "synthetic_acceptance_length"),

    "KVTransferConfig":
        _refused("not 'kv_both': only that makes vLLM fence blocks", "kv_role")
        | _refused("'recompute': vLLM would emit tokens computed on missing KV",
                   "kv_load_failure_policy")
        | _neutral("our own settings; the chunk size is in the geometry",
                   "kv_connector", "kv_connector_extra_config", "kv_connector_module_path")
        | _neutral("for other connectors",
                   "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size",
                   "kv_ip", "kv_port", "enable_permute_local_kv"),
}
"""By class and field."""

WHOLE: dict[str, Row] = (
    _key("part of ModelConfig.quantization_config",
         "QuantizationConfigArgs", "QuantSpec", "QuantKey", "ScaleDesc", "ScalarType")
    | _key("part of MultiModalConfig.limit_per_prompt",
           "BaseDummyOptions", "ImageDummyOptions", "VideoDummyOptions", "AudioDummyOptions")
    | _key("code of others, which may give an item another's encoding", "EncoderCacheManagerConfig")
    | _refused("set at all: see VllmConfig",
               "DiffusionConfig", "ECTransferConfig")
    | _refused("set at all: see AttentionConfig", "HiSparseConfig")
    | _neutral("where weights lie, or how they get there",
               "OffloadConfig", "UVAOffloadConfig", "PrefetchOffloadConfig", "EngramConfig",
               "WeightTransferConfig", "EPLBConfig")
    | _neutral("after the last layer that has KV",
               "PoolerConfig", "StructuredOutputsConfig", "ReasoningConfig", "AuxOutputConfig")
    | _neutral("after the last layer that has KV; never in the key: it holds a secret",
               "WatermarkConfig")
    | _neutral("fuses operations: fewer roundings of the same values", "PassConfig")
    | _neutral("how the same maths is compiled", "DynamicShapesConfig", "IrOpPriorityConfig")
    | _neutral("tells what happens", "ProfilerConfig", "ObservabilityConfig", "LoggingConfig",
               "KVEventsConfig")
    | _neutral("how long a failed rank is waited for", "FaultToleranceConfig")
)
"""Classes all of whose fields are treated alike."""
# fmt: on


def as_markdown() -> str:
    """The table as `docs/identity.md` shows it."""
    lines = ["| class | fields | | why |", "| --- | --- | --- | --- |"]
    for name, fields in FIELDS.items():
        for row, names in _by_row(fields).items():
            listed = ", ".join(f"`{field}`" for field in names)
            lines.append(f"| {name} | {listed} | {row.treatment.value} | {row.why} |")
    for row, classes in _by_row(WHOLE).items():
        lines.append(f"| {', '.join(classes)} | all | {row.treatment.value} | {row.why} |")
    return "\n".join(lines)


def _by_row(rows: dict[str, Row]) -> dict[Row, list[str]]:
    grouped: dict[Row, list[str]] = {}
    for name, row in rows.items():
        grouped.setdefault(row, []).append(name)
    return grouped


if __name__ == "__main__":
    print(as_markdown())
