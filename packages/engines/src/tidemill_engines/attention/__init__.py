"""Attention over packed rows, and its exchange between ranks (Ulysses)."""
