"""Engines that cannot map the trainer's memory, for example on other machines: a store for control, a wire
for bytes.
"""
