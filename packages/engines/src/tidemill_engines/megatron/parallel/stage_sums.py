"""Sums over all layers of a model whose pipeline stages are on different ranks."""

import torch
import torch.distributed as dist


class StageSums:
    """Sum, for one micro-batch, of one part from each model chunk of each pipeline stage. `add` does not block.

    A chunk's part is sent when its forward ends. The total is first needed on the last stage after its own forward, and
    then in the backward, which follows the forward of all stages: all parts have been sent by then.

    Args:
        group: gloo group of the stages, ordered by stage.
        number: number of the micro-batch, the same on all stages and unique among those in progress.
        num_chunks: chunks of each stage.
        for_last_only: True if there is no backward.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, num_chunks: int, *, for_last_only: bool) -> None:
        self._group = group
        self._number = number
        self._num_chunks = num_chunks
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._receivers = [self._size - 1] if for_last_only else list(range(self._size))
        self._own: list[torch.Tensor] = []
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._total: torch.Tensor | None = None

    def add(self, chunk: int, part: torch.Tensor) -> None:
        """Add the `part` of one of this stage's chunks; it has the same shape on all stages."""
        self._own.append(part)
        for stage in self._receivers if part.numel() else ():
            if stage != self._rank:
                sent = part.cpu()
                self._sends.append((dist.isend(sent, group=self._group, group_dst=stage, tag=self._tag(chunk)), sent))

    def total(self) -> torch.Tensor:
        """Sum over all chunks of all stages, on the device of the parts. Waits for the other stages' parts."""
        if self._total is None:
            assert len(self._own) == self._num_chunks, "total() called before add() for every chunk of this stage"
            total = torch.stack(self._own).sum(0)
            for stage in range(self._size) if total.numel() else ():
                for chunk in range(self._num_chunks if stage != self._rank else 0):
                    part = torch.empty_like(total, device="cpu")
                    dist.recv(part, group=self._group, group_src=stage, tag=self._tag(chunk))
                    total += part.to(total.device)
            self._total = total
        return self._total

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()

    def _tag(self, chunk: int) -> int:
        return self._number * self._num_chunks + chunk
