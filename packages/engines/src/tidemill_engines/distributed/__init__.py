"""torch's default process group, the device of a rank, and agreement between ranks."""
