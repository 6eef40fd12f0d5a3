"""The engine's side of the fast path."""
