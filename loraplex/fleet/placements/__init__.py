"""Policies that place adapters on replicas: one per file, all behind `placement.Placement`."""
