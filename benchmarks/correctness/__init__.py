"""The checks of `benchmarks.gpu_correctness`, one file for each section."""
