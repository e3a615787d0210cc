"""Processes that compute adapters on the CPU while their weights are on the way to the GPU."""
