"""The assets of `tidemill demo`: a tiny model, its tokenizer and a task with held-out problems, all made in code."""

from tidemill_trainer.demo.assets import write_assets

__all__ = ["write_assets"]
