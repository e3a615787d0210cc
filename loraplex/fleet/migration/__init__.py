"""Requests move, with their adapters, away from overloaded replicas (dLoRA, OSDI 2024, section 5.2)."""
