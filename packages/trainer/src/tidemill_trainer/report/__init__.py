"""`report.html`: a run in one self-contained file, from the charts down to single tokens."""

from tidemill_trainer.report.page import write_report

__all__ = ["write_report"]
