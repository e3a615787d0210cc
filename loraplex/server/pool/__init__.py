"""The adapter pool of a fleet: replicas copy adapters from each other's host memory."""
