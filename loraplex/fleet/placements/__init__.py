"""Which replicas serve which adapters: one policy a file, all behind `placement.Placement`."""
