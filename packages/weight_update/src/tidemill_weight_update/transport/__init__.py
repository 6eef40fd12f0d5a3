"""Transports that carry bucket bytes between processes that share no memory. A new one implements `Wire`."""
