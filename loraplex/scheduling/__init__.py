"""Which tokens run next, in which memory: plain Python over plain data, no clock, no I/O, no tensors."""
