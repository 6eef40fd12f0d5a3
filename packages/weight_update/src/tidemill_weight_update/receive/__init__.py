"""The engine's side of the fast path: reads buckets and copies them into the model's parameters."""
