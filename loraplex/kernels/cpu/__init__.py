"""Compiled float32 kernels for CPUs."""
