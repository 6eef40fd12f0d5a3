"""An engine that is not SGLang: an MLP, tensor-parallel over processes, which uses of this package only `Receiver`."""

import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tidemill_testing import ranks
from tidemill_weight_update import BucketHandle, PauseMode, Request
from tidemill_weight_update.receive import Receiver
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, INNER = 8, 12


class ShardedMlp(nn.Module):
    """One rank of `down(silu(gate(x)) * up(x))`, laid out as engines do: `gate` and `up` in one parameter.

    Attributes:
        gate_up: rows of this rank of gate, then those of up, [2 * INNER / size, HIDDEN].
        down: columns of this rank, [HIDDEN, INNER / size].
        down_t: derived from `down`: its transpose, contiguous, as the forward pass reads it.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.num_rows = rank, INNER // size
        self.gate_up = nn.Parameter(torch.zeros(2 * self.num_rows, HIDDEN), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(HIDDEN, self.num_rows), requires_grad=False)
        self.derive()

    def load_weights(self, weights: Any) -> None:
        """Load tensors named as in the checkpoint; `weights` yields (name, full tensor)."""
        start = self.rank * self.num_rows
        for name, tensor in weights:
            if name == "down_proj.weight":
                self.down.data.copy_(tensor.narrow(1, start, self.num_rows))
            elif name in ("gate_proj.weight", "up_proj.weight"):
                rows = self.gate_up.data.narrow(0, self.num_rows * (name[0] == "u"), self.num_rows)
                rows.copy_(tensor.narrow(0, start, self.num_rows))

    def derive(self) -> None:
        self.down_t = self.down.detach().t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.gate_up).chunk(2, -1)
        out = (functional.silu(gate) * up) @ self.down_t
        dist.all_reduce(out)
        return out


def _run_rank(rank: int, size: int, store: str, connection: Connection) -> None:
    """Answer the calls of `MlpEngine`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    model = ShardedMlp(rank, size)
    receiver = Receiver(model, rank, size, may_ignore=lambda name: name == "unused.bias", finish=model.derive)
    while True:
        match connection.recv():
            case ("load", request):
                try:
                    receiver.handle(request)
                except RuntimeError:  # nobody waits for this update any more
                    traceback.print_exc()
                connection.send(None)
            case ("answer", x):
                connection.send(model(torch.tensor(x)).tolist())
            case ("modules", _):
                connection.send(sorted(sys.modules))
            case _:
                return


class MlpEngine:
    """Its `EngineClient`. The engine has no prefix cache, and no requests run during an update.

    Args:
        tp_size: number of ranks.
        folder: folder for the rendezvous of the ranks.
    """

    has_loader = True

    def __init__(self, tp_size: int, folder: Path) -> None:
        self.tp_size = tp_size
        self._version = "none"
        pairs = [ranks.context().Pipe() for _ in range(tp_size)]
        self._connections = [local_end for local_end, _ in pairs]
        self._processes = [
            ranks.context().Process(target=_run_rank, args=(rank, tp_size, str(folder / "store"), end), daemon=True)
            for rank, (_, end) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def __repr__(self) -> str:
        return f"MlpEngine(tp_size={self.tp_size})"

    def load(self, request: Request, *, flush_cache: bool) -> None:
        self._call("load", request)

    def load_bucket(self, bucket: BucketHandle) -> None:
        raise NotImplementedError("only engines without the fast path receive buckets")

    def flush_cache(self) -> None:
        pass

    def pause(self, mode: PauseMode) -> None:
        pass

    def resume(self) -> None:
        pass

    def set_weight_version(self, version: str) -> None:
        self._version = version

    def get_weight_version(self) -> str:
        return self._version

    def answer(self, x: Tensor) -> Tensor:
        """Return the model's output for `x` [B, HIDDEN]."""
        return torch.tensor(self._call("answer", x.tolist())[0])

    def modules(self) -> set[str]:
        """Return the modules that the ranks have imported."""
        return set().union(*self._call("modules", None))

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(("close", None))
            process.join()

    def _call(self, method: str, argument: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((method, argument))
        return [connection.recv() for connection in self._connections]
