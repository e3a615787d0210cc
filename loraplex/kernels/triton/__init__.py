"""Triton kernels for CUDA devices: plain functions over tensors, each safe inside a CUDA graph."""
