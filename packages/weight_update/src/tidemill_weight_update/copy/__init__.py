"""Copying: tables of copies, the copiers that run them on a CPU or GPU, and checksums."""
