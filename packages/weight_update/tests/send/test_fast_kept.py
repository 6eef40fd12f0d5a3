"""The trainer's tensors while an update reads them by their addresses, and after it."""

import gc
import weakref

import torch
from tidemill_weight_update.send.fast import FastPath
from tidemill_weight_update.send.fingerprint import Fingerprint
from tidemill_weight_update.stages import Stages
from torch import Tensor


class Casting:
    """Makes its tensors anew in each iteration, where the last ones were."""

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


def test_tensors_that_are_recognised_live_while_they_are_sent_and_no_longer():
    """As the second update from a GPU: what was described of the first one is kept, but none of its tensors."""
    held = Casting()
    fast = FastPath(
        **{"bucket_bytes": 100, "dtype": None, "device": None, "allow_non_finite": False},
        **{"timeout_s": 1.0, "group_rank": 0, "link": None},
    )
    alive: list[int] = []

    def note(*_: object) -> None:
        alive.append(held.num_alive())

    for sequence in (1, 2):
        fast.begin(sequence)
        lines = fast.prepare(held, Stages(), lambda _: None)
        if sequence == 1:
            fast._fingerprint, fast._prepared = Fingerprint(list(held)), lines
        else:
            assert lines is fast._prepared
        assert fast.send(lines, fast.mailbox.path, 0, Stages(), note, note) == (1, 2, 32)
        if sequence == 2:
            assert held.num_alive() == 0
    assert alive[2:] == [2, 2]
    fast.close()
