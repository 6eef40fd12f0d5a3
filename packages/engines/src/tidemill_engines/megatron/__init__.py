"""The Megatron engine's parts; the extra `megatron` brings megatron-core."""
