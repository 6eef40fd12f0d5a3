"""The FSDP2 engine: torch's `fully_shard` over a Hugging Face model."""
