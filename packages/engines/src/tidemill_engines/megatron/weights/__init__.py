"""Weights under Hugging Face names: the names, and reading and exporting by them."""
