"""LoRA: adapter settings, PEFT's names, and merging adapters into base weights."""
