"""Log-probabilities, entropy and values from hidden states."""
