"""Losses and their metrics. A loss is a function of type `contract.LossFn`; `sft` is an example.

Any package can define one. The policy-gradient loss of the trainer is in `tidemill_trainer/losses.py`.
"""
