"""Tensor and numpy columns: row operations, checks and equality."""
