"""Policies that decide which replica serves a request: one per file."""
