"""Losses and their metrics. A loss is a function of type `contract.LossFn`; `sft` is an example.

Any package can define one. Those of policies and critics are in tidemill-algorithms.
"""
