"""The engine: carries out what the scheduler decides, and turns text into tokens and back."""
