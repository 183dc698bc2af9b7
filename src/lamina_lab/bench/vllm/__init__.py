"""`lamina bench vllm`: first-token times of hits on a real vLLM, against its own GPU-memory hit."""
