"""Scheduling decisions: plain Python over plain data, no clock, no I/O, no tensors."""
