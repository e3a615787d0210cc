"""Decisions about many replicas: plain Python and numpy over plain data, no clock, no I/O, no tensors."""
