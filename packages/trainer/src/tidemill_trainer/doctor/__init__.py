"""Checks of the machines of a run, before anything expensive starts."""
