"""What `benchmarks.gpu_correctness` checks, one file for each section."""
