"""Parts of `bench/verl.py`; verl itself loads `verl_hooks.py`, in its own environment."""
