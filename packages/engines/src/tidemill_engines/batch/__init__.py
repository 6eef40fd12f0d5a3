"""From a DataProto to packed micro-batches, and from their outputs back to columns."""
