"""Changes to megatron-core: what it does wrong or slowly here, replaced."""
