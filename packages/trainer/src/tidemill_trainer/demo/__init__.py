"""The assets of `tidemill demo`, all generated: a tiny model, its tokenizer and a task with held-out problems."""

from tidemill_trainer.demo.assets import write_assets

__all__ = ["write_assets"]
