"""Agreement between the trainer's ranks, so that an error on one of them is an error on all."""

import torch
import torch.distributed as dist


class Ranks:
    """The ranks that call `update` together: those of `process_group`, or this process alone.

    Without torch.distributed, or in a group of one, nothing is communicated. `rank` is the rank in the group, `owner`
    the global rank of the group's rank 0.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self._group = process_group
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.size = dist.get_world_size(process_group) if distributed else 1
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group; only its members may update weights")
        self.owner = dist.get_process_group_ranks(process_group)[0] if distributed else 0
        on_cuda = self.size > 1 and dist.get_backend(process_group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def agree(self, error: Exception | None, digest: int, description: str) -> None:
        """Returns on every rank, or raises on every rank.

        Args:
            error: what went wrong on this rank.
            digest: signed 64-bit; must be equal on all ranks.
            description: what `digest` stands for, shown if it differs.

        Raises:
            Exception: `error` itself, on its rank.
            RuntimeError: on the other ranks, naming the failed ranks and their errors; or digests differ.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        mine = torch.tensor([error is not None, digest], dtype=torch.int64, device=self._device)
        gathered = torch.empty(self.size, 2, dtype=torch.int64, device=self._device)
        dist.all_gather(list(gathered.unbind()), mine, group=self._group)
        failed, digests = gathered.cpu().unbind(dim=1)
        if not failed.any() and (digests == digests[0]).all():
            return
        message = description if error is None else f"{type(error).__name__}: {error}"
        messages: list[str] = [""] * self.size
        dist.all_gather_object(messages, message, group=self._group)
        if error is not None:
            raise error
        if failed.any():
            which = failed.nonzero().flatten().tolist()
            told = "; ".join(f"rank {rank} of {self.size}: {messages[rank]}" for rank in which)
            raise RuntimeError(f"weight update failed on {told}")
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages))
        raise RuntimeError(f"the ranks disagree about this update; all must pass the same. {told}")
