"""A micro-batch as Megatron takes it, and its way through the pipeline."""
