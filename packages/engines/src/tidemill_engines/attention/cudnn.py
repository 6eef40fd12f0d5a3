"""Causal attention over packed rows with cuDNN's fused kernels, through cuDNN's graph API (the extra `cudnn`).

torch 2.11 has the same kernels for rows of different lengths, but creates a plan for every call.
"""

import functools
from dataclasses import dataclass
from typing import Any

import cudnn
import torch

_DTYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}

# Ids of a graph's tensors. Tensors of one dict have the same heads, width and row starts.
_QUERY = {"q": 1, "o": 2, "dO": 3, "dQ": 4}
_KEY = {"k": 5, "v": 6, "dK": 7, "dV": 8}
_STATS = {"stats": 9}
_LENGTHS, _QUERY_STARTS, _KEY_STARTS, _STATS_STARTS = 10, 11, 12, 13


def cudnn_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scaling: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within each row.

    Args:
        q: [N, H, D]; k and v: [N, H_kv, D], contiguous, in half precision. H_kv divides H, and D is a multiple of 8 up
            to 128.
        cu_seqlens: [B + 1] int32, start of each row, then the end of the last.
        max_length: number of tokens of the longest row.
        scaling: factor of the scores; None is D ** -0.5.

    Returns:
        [N, H, D].
    """
    out, _ = _attention(q, k, v, cu_seqlens, max_length, q.shape[-1] ** -0.5 if scaling is None else scaling)
    return out


@torch.library.custom_op("tidemill::cudnn_attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_length: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the logarithm of the sum of each softmax, [N, H]."""
    out, stats = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    shape = _Shape.of(q, k, cu_seqlens, max_length, scaling)
    _execute(_forward_plan(shape), shape, cu_seqlens, {"q": q, "k": k, "v": v, "o": out, "stats": stats})
    return out, stats


@_attention.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("tidemill::cudnn_attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    max_length: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tensors = {"q": q, "k": k, "v": v, "o": out, "stats": stats, "dO": grad.contiguous()}
    tensors |= zip(("dQ", "dK", "dV"), grads, strict=True)
    shape = _Shape.of(q, k, cu_seqlens, max_length, scaling)
    _execute(_backward_plan(shape, torch.are_deterministic_algorithms_enabled()), shape, cu_seqlens, tensors)
    return grads


@_attention_backward.register_fake
def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.max_length, ctx.scaling = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_attention_backward(grad, *ctx.saved_tensors, ctx.max_length, ctx.scaling), None, None, None


_attention.register_autograd(_backward, setup_context=_save)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """The key of a cached plan; creating a plan takes about 0.04 s on the host.

    To limit the number of plans, rows, their length and the number of tokens are rounded up to powers of two;
    additional rows are empty. The length is at least 128, since cuDNN does not support a length of 1.
    """

    device: torch.device
    dtype: torch.dtype
    rows: int
    length: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor, max_length: int, scaling: float
    ) -> "_Shape":
        num_tokens, heads, head_dim = q.shape
        return cls(
            device=q.device,
            dtype=q.dtype,
            rows=_power_of_two(len(cu_seqlens) - 1),
            length=max(_power_of_two(max_length), 128),
            tokens=_power_of_two(num_tokens),
            heads=heads,
            kv_heads=k.shape[1],
            head_dim=head_dim,
            scaling=scaling,
        )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Graph:
    """A cuDNN graph for a shape; its tensors are [rows, heads, length, width], with packed rows."""

    def __init__(self, shape: _Shape) -> None:
        self.graph = cudnn.pygraph(
            handle=_handle(shape.device),
            io_data_type=_DTYPES[shape.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self._shape = shape
        self._starts = {uid: self._integers(uid, shape.rows + 1) for uid in (_QUERY_STARTS, _KEY_STARTS, _STATS_STARTS)}
        lengths = self._integers(_LENGTHS, shape.rows)
        self.mask = {
            "attn_scale": shape.scaling,
            "use_padding_mask": True,
            "seq_len_q": lengths,
            "seq_len_kv": lengths,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }

    def inputs(self, *names: str) -> dict[str, Any]:
        return {name: self.graph.tensor(name=name, **self._described(name)) for name in names}

    def build(self, **outputs: Any) -> tuple[Any, int]:
        """Return the executable graph and the bytes of its workspace."""
        for name, tensor in outputs.items():
            described = self._described(name)
            tensor.set_output(True).set_uid(described["uid"]).set_data_type(described["data_type"])
            tensor.set_dim(described["dim"]).set_stride(described["stride"])
            tensor.set_ragged_offset(described["ragged_offset"])
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        return self.graph, self.graph.get_workspace_size()

    def _described(self, name: str) -> dict[str, Any]:
        shape = self._shape
        if name in _QUERY:
            uid, heads, width, starts = _QUERY[name], shape.heads, shape.head_dim, _QUERY_STARTS
        elif name in _KEY:
            uid, heads, width, starts = _KEY[name], shape.kv_heads, shape.head_dim, _KEY_STARTS
        else:
            uid, heads, width, starts = _STATS[name], shape.heads, 1, _STATS_STARTS
        return {
            "uid": uid,
            "dim": [shape.rows, heads, shape.length, width],
            "stride": [shape.length * heads * width, width, heads * width, 1],
            "data_type": cudnn.data_type.FLOAT if name in _STATS else _DTYPES[shape.dtype],
            "ragged_offset": self._starts[starts],
        }

    def _integers(self, uid: int, count: int) -> Any:
        return self.graph.tensor(
            name=f"integers_{uid}", dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32, uid=uid
        )


@functools.cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.cache
def _forward_plan(shape: _Shape) -> tuple[Any, int]:
    graph = _Graph(shape)
    out, stats = graph.graph.sdpa(name="forward", **graph.inputs("q", "k", "v"), **graph.mask, generate_stats=True)
    return graph.build(o=out, stats=stats)


@functools.cache
def _backward_plan(shape: _Shape, deterministic: bool) -> tuple[Any, int]:
    graph = _Graph(shape)
    grad_q, grad_k, grad_v = graph.graph.sdpa_backward(
        name="backward",
        **graph.inputs("q", "k", "v", "o", "dO", "stats"),
        **graph.mask,
        max_total_seq_len_q=shape.tokens,
        max_total_seq_len_kv=shape.tokens,
        use_deterministic_algorithm=deterministic,
    )
    return graph.build(dQ=grad_q, dK=grad_k, dV=grad_v)


def _execute(plan: tuple[Any, int], shape: _Shape, cu_seqlens: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    graph, workspace_bytes = plan
    absent = shape.rows + 1 - len(cu_seqlens)
    starts = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(absent)])
    uids = _QUERY | _KEY | _STATS
    pack = {uids[name]: tensor for name, tensor in tensors.items()} | {
        _LENGTHS: starts.diff(),
        _QUERY_STARTS: starts * (shape.heads * shape.head_dim),
        _KEY_STARTS: starts * (shape.kv_heads * shape.head_dim),
        _STATS_STARTS: starts * shape.heads,
    }
    workspace = torch.empty(max(workspace_bytes, 1), dtype=torch.uint8, device=shape.device)
    handle = _handle(shape.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(shape.device).cuda_stream)
    graph.execute(pack, workspace, handle=handle)
