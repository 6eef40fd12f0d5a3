"""Lifetime of the trainer's tensors, which an update reads by address."""

import gc
import weakref

import torch
from tidemill_weight_update.send.fast import FastPath
from tidemill_weight_update.send.fingerprint import Fingerprint
from tidemill_weight_update.stages import Stages
from torch import Tensor


class ViewsOnDemand:
    """Iterable that makes new tensors at the same addresses in each iteration."""

    def __init__(self) -> None:
        self.memory = torch.randn(8)
        self.made: list[weakref.ref[Tensor]] = []

    def __iter__(self):
        self.made.clear()
        for name, values in (("a", self.memory[:4]), ("b", self.memory[4:])):
            tensor = values.view(2, 2)
            self.made.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    def num_alive(self) -> int:
        gc.collect()
        return sum(tensor() is not None for tensor in self.made)


def test_recognized_tensors_are_kept_alive_only_while_they_are_sent():
    """As in the second update from a GPU: the fingerprint of the first update is kept, its tensors are not."""
    views = ViewsOnDemand()
    fast = FastPath(
        **{"bucket_bytes": 100, "dtype": None, "device": None, "allow_non_finite": False},
        **{"timeout_s": 1.0, "group_rank": 0, "link": None},
    )
    alive: list[int] = []

    def record_alive(*_: object) -> None:
        alive.append(views.num_alive())

    for sequence in (1, 2):
        fast.begin(sequence, [])
        lines = fast.prepare(views, Stages(), lambda _: None)
        if sequence == 1:
            fast._fingerprint, fast._prepared = Fingerprint(list(views)), lines
        else:
            assert lines is fast._prepared
        assert fast.send(lines, fast.mailbox.path, 0, Stages(), record_alive, record_alive) == (1, 2, 32)
        if sequence == 2:
            assert views.num_alive() == 0
    assert alive[2:] == [2, 2]
    fast.close()
