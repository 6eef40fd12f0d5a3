"""Engine whose ranks are the processes of sglang_models_script.py; the first one is also the trainer."""

from contextlib import closing

import torch
from engine_state import LoaderState
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.receive.receiver import Receiver
from tidemill_weight_update.sglang.loader import finish_load


class RankEngine(LoaderState):
    """Client of an engine whose first rank is this process; the other ranks run `serve`."""

    def __init__(self, receiver, pipes):
        super().__init__("ranks", 1 + len(pipes))
        self.receiver, self.pipes = receiver, pipes

    def load(self, request, *, flush_cache):
        for pipe in self.pipes:
            pipe.send(request)
        self.receiver.handle(request)
        for pipe in self.pipes:
            pipe.recv()


def serve(receiver, pipe):
    """Handle the requests that the first rank sends, until it sends None."""
    while (request := pipe.recv()) is not None:
        receiver.handle(request)
        pipe.send("done")


def send(engine, tensors, group):
    """Update the engine, a second time with `partial` if it refuses; return the messages of refused updates."""
    refused = []
    for partial in (False, True):
        with closing(WeightUpdater([engine], bucket_bytes=1 << 14, process_group=group, timeout_s=60)) as updater:
            try:
                stats = updater.update(tensors.items(), 1, partial=partial)
            except RuntimeError as error:
                refused.append(str(error))
                continue
            assert (stats.verified, stats.through_loader, engine.version) == (True, {}, "1")
            break
    return refused


def send_or_serve(model, tensors, rank, pipes):
    """Update `model`, one rank of an SGLang model; called on all ranks.

    Args:
        pipes: on the first rank, pipes to the others; on the others, the pipe to the first one.

    Returns:
        messages of refused updates, on the first rank.
    """
    tied = model.config.tie_word_embeddings
    num_ranks = torch.distributed.get_world_size()
    receiver = Receiver(
        model, rank, num_ranks, lambda name: tied and name == "lm_head.weight", lambda: finish_load(model)
    )
    trainer = torch.distributed.new_group([0])
    if rank != 0:
        serve(receiver, pipes[0])
        return []
    try:
        return send(RankEngine(receiver, pipes), tensors, trainer)
    finally:
        for pipe in pipes:
            pipe.send(None)
