"""A slim reinforcement-learning trainer that composes the tidemill packages."""

from tidemill_trainer.cli import main

__all__ = ["main"]
