"""Live replicas behind one address: engine processes on this machine, or servers elsewhere."""
