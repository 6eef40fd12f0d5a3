"""Buffers cut into pieces and joined again."""

import numpy as np
import pytest
from tidemill_dataproto.formats import pieces


@pytest.mark.parametrize("cores", [2, 64])
@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 20, (1 << 20) + 1, 5 << 20, 8 << 20, (8 << 20) + 1])
def test_cut_then_join_is_the_identity(cores: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    data = np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8)
    buffers = pieces.cut(data.data)
    is_cut = cores == 2 and num_bytes <= 8 << 20
    assert len(buffers) == (max(1, -(-num_bytes // (1 << 20))) if is_cut else 1)
    in_place = pieces.join(buffers)
    assert in_place.numpy().tobytes() == data.tobytes()
    assert num_bytes == 0 or in_place.data_ptr() == data.ctypes.data  # consecutive pieces are not copied
    scattered = pieces.join([bytearray(buffer) for buffer in buffers])
    assert scattered.numpy().tobytes() == data.tobytes()


def test_joined_pieces_keep_their_memory_alive() -> None:
    data = np.arange(3 << 20, dtype=np.uint8)
    expected = data.tobytes()
    data.flags.writeable = False
    joined = pieces.join([data[at : at + (1 << 20)] for at in range(0, 3 << 20, 1 << 20)])
    del data
    np.full(3 << 20, 1, dtype=np.uint8)  # would reuse the memory if it were free
    assert joined.numpy().tobytes() == expected
