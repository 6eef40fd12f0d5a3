"""Values as workers receive them."""

import pytest

np = pytest.importorskip("numpy")
ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")
from tidemill_dispatch.ray.pickling import pack, unpacked  # noqa: E402


def received(value):
    """Return what a worker receives for a small value, without a cluster."""
    return unpacked(pack("value", value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (2, 0), (0,)])
def test_tensors_are_received_as_equal_copies(dtype, shape):
    base = torch.randint(0, 2, (4, *shape, 2)).to(dtype)
    for tensor in (base, base[1], base[2:, ..., 1], base.transpose(0, -1), base[:, ..., :1]):
        got = received({"x": [tensor]})["x"][0]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got, tensor)
        got.zero_()  # writable, and not shared
        assert torch.equal(received(tensor), tensor)


def test_special_tensors_are_pickled_by_torch():
    leaf = torch.ones(2, requires_grad=True)
    assert received(leaf).requires_grad
    assert received(torch.nn.Parameter(torch.ones(2))).requires_grad
    assert received(torch.eye(2).to_sparse()).is_sparse
    assert received(torch.eye(2).to_sparse_csr()).layout == torch.sparse_csr
    assert torch.equal(received(torch.tensor([1j]).conj()), torch.tensor([-1j]))
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert [row.shape[0] for row in received(ragged).unbind()] == [1, 2]


def test_tensor_slice_is_pickled_without_its_storage():
    assert pack("value", torch.zeros(1_000_000)[:10]).num_bytes < 1000


@pytest.mark.parametrize("value", [None, 3, 2.5, "x", b"y", {"a": (1, [2])}])
def test_plain_values_are_received_equal(value):
    assert received(value) == value


@pytest.mark.parametrize("rows", [3, 100_000])
def test_arrays_are_received_read_only(ray_cluster, rows):
    packed = pack("value", {"x": np.arange(rows)})
    got = received_from_ray(packed)["x"]
    assert not got.flags.writeable
    assert np.array_equal(got, np.arange(rows))


def received_from_ray(packed):
    """Return what a worker receives for a packed value, which is an object reference if it is large."""
    return unpacked(ray.get(packed if isinstance(packed, ray.ObjectRef) else ray.put(packed)))


def test_argument_that_cannot_be_pickled_is_named():
    with pytest.raises(TypeError, match=r"argument 'lock' of W.f cannot be pickled: .*lock.*; pass plain data"):
        pack("argument 'lock' of W.f", {"inner": __import__("threading").Lock()})


def test_batch_inside_of_another_value_is_received_as_a_copy():
    dataproto = pytest.importorskip("tidemill_dataproto")
    batch = dataproto.DataProto.from_dict({"x": torch.ones(3)})
    packed = pack("value", {"roles": [batch, batch]})
    first, same = unpacked(packed)["roles"]
    assert first is same
    first["x"].zero_()
    assert unpacked(packed)["roles"][0]["x"].eq(1).all()  # what another rank receives
