"""The executor for NVIDIA GPUs: CUDA graphs, steps that run ahead, adapters copied in beside them."""
