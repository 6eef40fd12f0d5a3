"""The trainer's side."""
