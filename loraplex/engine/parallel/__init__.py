"""One engine over several processes, each with a shard of the model and of every adapter."""
