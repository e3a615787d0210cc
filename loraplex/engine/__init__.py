"""The engine: executes the scheduler's decisions, and converts text to tokens and back."""
