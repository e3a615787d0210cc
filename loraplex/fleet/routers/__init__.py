"""Who serves which request: one policy a file."""
