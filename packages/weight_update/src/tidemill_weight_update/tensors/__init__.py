"""What a trainer rank holds: tensors, shards, boxes."""
