"""Attention over packed rows, and Ulysses sequence parallelism."""
