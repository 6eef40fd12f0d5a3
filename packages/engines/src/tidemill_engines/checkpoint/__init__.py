"""Training checkpoints: the folder format, and saving in the background."""
