"""Batching policies, one a file."""
