"""A fleet that serves: replicas, and the servers elsewhere that may be some of them."""
