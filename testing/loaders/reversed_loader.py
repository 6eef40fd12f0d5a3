"""Weight loader of a user, for SGLang's `custom_weight_loader`."""


def load_reversed(model, named_tensors):
    """Load the tensors in reversed order, inside the scheduler."""
    model.load_weights(reversed(named_tensors))
