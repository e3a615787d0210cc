"""Scripts that made the published numbers. From the repository root: `python -m benchmarks.<name>`."""
