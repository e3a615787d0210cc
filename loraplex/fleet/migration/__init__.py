"""Migration of requests away from overloaded replicas, with their adapters (dLoRA, OSDI 2024, section
5.2)."""
