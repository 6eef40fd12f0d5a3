"""What `bench/weight_update.py` is made of."""
