"""What stock `load_weights` does, recorded as a plan of copies."""
