"""Carrying out many copies at once, and checksums of what was copied."""
