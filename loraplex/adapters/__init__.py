"""LoRA adapters: reading, judging, naming, finding and remembering PEFT checkpoints. No torch here."""
