"""Transports for bucket bytes between processes that cannot map each other's memory.

To add one, implement `wire.Wire` in a module of its own and select it in `wire.connect`.
"""
