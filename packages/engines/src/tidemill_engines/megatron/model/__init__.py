"""Megatron's model and the modules of its layers."""
