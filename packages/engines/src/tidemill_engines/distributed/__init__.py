"""Process groups, and agreement between ranks."""
