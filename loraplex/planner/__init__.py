"""Plans a fleet: how many GPUs, which adapter where, and with how many slots."""
