"""LoRA: what an adapter is, and what it makes of the weights it belongs to."""
