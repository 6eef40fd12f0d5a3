"""The head of the model: log-probabilities, entropy and values from hidden states."""
