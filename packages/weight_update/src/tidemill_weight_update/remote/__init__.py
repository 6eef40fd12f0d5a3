"""Engines that cannot map the trainer's memory, as on other machines: a store for control, a wire for bytes."""
