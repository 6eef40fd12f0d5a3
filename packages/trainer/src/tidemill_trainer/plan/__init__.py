"""The memory and the transfers that a configuration requires, without a GPU."""
