"""Training checkpoints as folders, and the thread that saves them."""
