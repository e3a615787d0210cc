"""LoRA adapters: reading, validating, naming, finding and registering PEFT checkpoints. No torch here."""
