"""Tensors as a trainer rank holds them: plain tensors, DTensors, local shards, and the index boxes they cover."""
