"""Variables of the environment that change the values of KV: they are in the key.

Read in vLLM 0.26.0's and 0.32.0's sources, as `fields` is.
"""

ENVIRONMENT = (
    "VLLM_PLUGINS",  # which plugins are loaded: they may replace models and kernels
    "VLLM_BATCH_INVARIANT",  # who sets it wants the same bits every time
    "VLLM_FLOAT32_MATMUL_PRECISION",  # float32 is multiplied as TF32 or bfloat16
    "VLLM_VIDEO_LOADER_BACKEND",  # which frames of a video are taken; its hash may not show it
    "XHS_VIDEO_JPEG_QUALITY",  # Dots 3 Note makes JPEGs of a video's frames
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",  # tokens go to made-up experts
    "VLLM_DISABLED_KERNELS",  # the next kernel may round activations, or not
    "VLLM_TEST_FORCE_FP8_MARLIN",  # FP8 weights with 16-bit activations
    "VLLM_MARLIN_INPUT_DTYPE",  # rounds activations to INT8 or FP8
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",  # rounds weights; may be a file's name
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",  # rounds activations; may be a file's name
    "VLLM_HUMMING_USE_F16_ACCUM",  # sums in float16
    "VLLM_USE_DEEP_GEMM",  # DeepGEMM rounds weights again, to scales that are powers of two
    "VLLM_MOE_USE_DEEP_GEMM",  # the same, for experts
    "VLLM_USE_DEEP_GEMM_E8M0",  # whether it does
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",  # who rounds activations to FP8, and how
    "VLLM_USE_FLASHINFER_MOE_INT4",  # INT4 experts in another format
    "VLLM_B12X_MOE_FP4_FORCE_A16",  # experts' activations in 16 bits instead of FP4
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",  # activations are sent to experts in FP4
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",  # and come back in FP8
    "VLLM_CPU_INT4_W4A8",  # activations in INT8 instead of 16 bits
    "VLLM_CPU_SGL_KERNEL",  # INT8 activations by another library
    "VLLM_XPU_INC_WNA16_BACKEND",  # w4a8: activations in INT8
    "VLLM_ROCM_USE_AITER",  # AITER's kernels, with FP4 and FP8 activations of their own
    "VLLM_ROCM_USE_AITER_LINEAR",
    "VLLM_ROCM_USE_AITER_MOE",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_FP8BMM",  # rounds MLA's up-projections to FP8
    "VLLM_ROCM_USE_AITER_FP4BMM",  # and to FP4
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS",  # rounds shared experts to MXFP4
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",  # attention multiplies in FP8
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",  # sums of ranks are sent in few bits
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",  # another order in a page, which strides do not show
)
"""Variables that change values by more than rounding. Whether one is set counts too, not only its
value: vLLM asks for that (`envs.is_set`). Not here, since they show elsewhere: VLLM_MLA_DISABLE and
VLLM_KV_CACHE_LAYOUT (geometry, layout), VLLM_USE_MODELSCOPE (weights), K_SCALE_CONSTANT and its
like (only with scales that are refused)."""
