"""The parts of scripts/train_demo_adapters.py: prompts, styles, recipes and the training loop."""
