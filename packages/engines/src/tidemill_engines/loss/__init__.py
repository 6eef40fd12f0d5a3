"""Losses and their metrics. A new loss is a module here with a function of type `contract.LossFn`; see `sft`."""
