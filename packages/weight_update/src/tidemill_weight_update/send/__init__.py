"""The trainer's side: describes, packs and publishes tensors, and calls the engines."""
