"""Carrying out many copies at once, and digests of what was copied."""
