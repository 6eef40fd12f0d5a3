"""Copy plans: `load_weights` recorded on tensors without data, with proof of coverage."""
