"""Sums over all layers of a model whose stages are on different ranks."""

import torch
import torch.distributed as dist


class StageSums:
    """The sum, for one micro-batch, of what each chunk of each stage adds. Stages never wait for one another here.

    A chunk's part is sent when its forward ends, and the total is first needed on the last stage behind its own, then
    in the backward, which follows the forward of all stages: by then all parts are under way.

    Args:
        group: gloo over the stages, the last one at its end.
        number: of the micro-batch, the same on all stages and different while another is under way.
        num_chunks: of each stage.
        for_last_only: whether there will be no backward.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, num_chunks: int, *, for_last_only: bool) -> None:
        self._group = group
        self._number = number
        self._num_chunks = num_chunks
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._receivers = [self._size - 1] if for_last_only else list(range(self._size))
        self._own: list[torch.Tensor] = []
        self._under_way: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._total: torch.Tensor | None = None

    def add(self, chunk: int, part: torch.Tensor) -> None:
        """This stage's `part`, of the same shape from all stages."""
        self._own.append(part)
        for stage in self._receivers if part.numel() else ():
            if stage != self._rank:
                sent = part.cpu()
                self._under_way.append(
                    (dist.isend(sent, group=self._group, group_dst=stage, tag=self._tag(chunk)), sent)
                )

    def total(self) -> torch.Tensor:
        """Over all chunks of all stages, on the device of the parts."""
        if self._total is None:
            assert len(self._own) == self._num_chunks, "all chunks of a stage come before the total is asked for"
            total = torch.stack(self._own).sum(0)
            for stage in range(self._size) if total.numel() else ():
                for chunk in range(self._num_chunks if stage != self._rank else 0):
                    part = torch.empty_like(total, device="cpu")
                    dist.recv(part, group=self._group, group_src=stage, tag=self._tag(chunk))
                    total += part.to(total.device)
            self._total = total
        return self._total

    def finish(self) -> None:
        """Waits until what was sent has left."""
        for work, _ in self._under_way:
            if work is not None:
                work.wait()
        self._under_way.clear()

    def _tag(self, chunk: int) -> int:
        return self._number * self._num_chunks + chunk
