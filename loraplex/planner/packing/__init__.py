"""Packers: each divides adapters among GPUs."""
