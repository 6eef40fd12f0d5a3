"""Values on their way to a worker."""

import pytest

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")
from tidemill_dispatch.ray.pickling import pack, unpacked  # noqa: E402


def there(value):
    """What a worker gets of a small value; no cluster is needed for that."""
    return unpacked(pack("value", value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (2, 0), (0,)])
def test_tensors_arrive_equal_and_on_their_own(dtype, shape):
    base = torch.randint(0, 2, (4, *shape, 2)).to(dtype)
    for tensor in (base, base[1], base[2:, ..., 1], base.transpose(0, -1), base[:, ..., :1]):
        got = there({"x": [tensor]})["x"][0]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got, tensor)
        got.zero_()  # writable, and nobody else's
        assert torch.equal(there(tensor), tensor)


def test_tensors_that_are_more_than_their_values_travel_as_torch_sends_them():
    leaf = torch.ones(2, requires_grad=True)
    assert there(leaf).requires_grad
    assert there(torch.nn.Parameter(torch.ones(2))).requires_grad
    assert there(torch.eye(2).to_sparse()).is_sparse
    assert torch.equal(there(torch.tensor([1j]).conj()), torch.tensor([-1j]))
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert [row.shape[0] for row in there(ragged).unbind()] == [1, 2]


def test_a_slice_travels_without_the_rest():
    assert pack("value", torch.zeros(1_000_000)[:10]).num_bytes < 1000


@pytest.mark.parametrize("value", [None, 3, 2.5, "x", b"y", {"a": (1, [2])}])
def test_plain_values_arrive_equal(value):
    assert there(value) == value


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(TypeError, match=r"argument 'lock' of W.f cannot be pickled: .*lock.*; pass plain data"):
        pack("argument 'lock' of W.f", {"inner": __import__("threading").Lock()})
