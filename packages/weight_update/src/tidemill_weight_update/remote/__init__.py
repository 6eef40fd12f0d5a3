"""Engines that cannot map the memory of the trainer, for example on other machines."""
