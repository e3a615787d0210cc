"""Processes that compute LoRA on CPU cores while an adapter's weights are being copied to the GPU."""
