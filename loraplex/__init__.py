"""loraplex: many LoRA adapters on one base LLM, at the price of the base model."""

__version__ = "0.1.0"
