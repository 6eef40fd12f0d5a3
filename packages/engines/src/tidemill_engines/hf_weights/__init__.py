"""Weights in Hugging Face format: names and layout, reading, export."""
