"""Decoder-only model families: configuration, weights, forward pass."""
