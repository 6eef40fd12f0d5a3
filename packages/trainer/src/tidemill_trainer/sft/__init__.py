"""Supervised fine-tuning and direct preference optimization: `tidemill sft`."""
