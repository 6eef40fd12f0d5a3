"""Weights in Hugging Face format: their names and layout, reading and export.

Where to add the weight names of a new model:

- FSDP2 uses the model and the weight conversions of transformers. `layout` maps the checkpoint's tensors to those of
  the model; add an operation there if transformers converts weights in a way that it rejects.
- Megatron has its own modules: add rules to `megatron/weights/names.py`, and the fields of `config.json` to
  `megatron/architecture.py`.
"""
