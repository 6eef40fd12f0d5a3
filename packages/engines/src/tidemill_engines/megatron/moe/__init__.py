"""Mixture-of-experts (MoE) models: routers, balance loss, router replay."""
