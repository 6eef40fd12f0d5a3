"""Replacements of and monkeypatches for parts of megatron-core that are wrong, slow or missing for this engine.

Each patch has a module of its own, whose docstring has four headings: what upstream does, the problem with it here, the
version in which it was seen, and what allows its removal. `context.apply_patches` applies those that replace attributes
of megatron-core's modules; the others are classes and functions that the engine uses instead of Megatron's.

| module | replaces | because |
|---|---|---|
| `cpu` | CUDA calls | Megatron does not run on a CPU |
| `without_te` | optional imports and the choice of AdamW | they assume Transformer Engine or Apex |
| `checkpoint_without_output` | a default argument | recomputing norms fails |
| `bucket_padding` | sizes of gradient buckets in checkpoints | optimizer state is saved wrong |
| `data_parallel` | flags of parameters and buckets | gradients or weights are wrong, or a failed step blocks |
| `rms_norm` | Megatron's norm | refuses sequence parallelism |
| `apply_rotary` | `apply_rotary_pos_emb` | slow for packed rows |
| `dispatcher` | the token dispatchers | slow |
| `experts` | `SequentialMLP` | slow |
| `weight_gradients` | Apex's kernel for weight gradients | slow without it |
| `grad_norm` | `get_grad_norm` | slow |
"""
