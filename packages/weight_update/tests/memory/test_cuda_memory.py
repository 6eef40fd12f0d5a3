"""GPU memory mapped by another process, on the same GPU and on another."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch
from tidemill_weight_update.copy.checksum import checksum_rows
from tidemill_weight_update.cuda_memory import DeviceArena, DeviceMemory, ImportedMemory, NotExportableError, export

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20

# Maps each announced memory twice, reads it with the copy kernel and prints the checksum and the sum.
READER = """
import json, sys
import numpy as np
import torch
from tidemill_weight_update.copy.cuda import CudaCopier
from tidemill_weight_update.cuda_memory import DeviceMemory, ImportedMemory
from tidemill_weight_update.copy.table import COLUMNS, CopyTable
device = torch.device("cuda", int(sys.argv[1]))
torch.cuda.set_device(device)

def read(address, offset, num_bytes):
    columns = {name: np.zeros(1, np.int64) for name in COLUMNS}
    columns |= {"src": np.array([offset]), "cols": np.array([num_bytes]), "rows": np.array([1])}
    checksums = torch.zeros(1, dtype=torch.int64, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    copier = CudaCopier([CopyTable(torch.uint8, torch.uint8, **columns)], device)
    copier.run([address], [target.data_ptr()], checksums)
    return [checksums.item(), target.long().sum().item()]

memories = {}
for line in sys.stdin:
    memory, offset, num_bytes, close = json.loads(line)
    memory = DeviceMemory(**memory)
    free = torch.cuda.mem_get_info(device)[0]
    try:
        if memory not in memories:
            memories[memory] = ImportedMemory(memory, device), ImportedMemory(memory, device)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
        continue
    mapped = memories[memory]
    found = [read(mapped[0].address, offset, num_bytes)]
    if close:
        mapped[0].close()
        found.append(read(mapped[1].address, offset, num_bytes))
        mapped[1].close()
        mapped[1].close()
        del memories[memory]
    torch.cuda.empty_cache()
    contexts = [torch._C._cuda_hasPrimaryContext(i) for i in range(torch.cuda.device_count())]
    print(json.dumps([found, contexts]), flush=True)
"""


class Reader:
    """Process that runs READER on a device."""

    def __init__(self, device: int) -> None:
        command = [sys.executable, "-c", READER, str(device)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, memory, offset, num_bytes, close=False):
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        fields = asdict(memory)
        self.process.stdin.write(json.dumps([fields, offset, num_bytes, close]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module", params=[0, 1, 3], ids=lambda device: f"reader on cuda:{device}")
def reader(request):
    if torch.cuda.device_count() <= request.param:
        pytest.skip(f"needs {request.param + 1} GPUs")
    reader = Reader(request.param)
    try:
        block = random_bytes(8 * MIB)  # loads CUDA modules before memory is measured
        torch.cuda.synchronize()
        reader.ask(export(block.data_ptr(), DEVICE), 0, 8 * MIB, close=True)
        yield reader, request.param
    finally:
        reader.kill()


def random_bytes(num_bytes):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=DEVICE)


def content(tensor):
    return [checksum_rows(tensor[None], 0, 0).item(), tensor.long().sum().item()]


def free_bytes():
    """Return the free memory once it does not change: processes that have just ended free theirs a little later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = -1
    while (free := torch.cuda.mem_get_info(DEVICE)[0]) != before:
        before = free
        time.sleep(1)
    return free


def test_another_process_reads_a_tensor_inside_an_allocation(reader):
    process, device = reader
    block = random_bytes(8 * MIB)  # one segment of torch's allocator; the tensor is in its middle
    tensor = block[MIB + 48 : 3 * MIB]
    torch.cuda.synchronize()
    memory = export(tensor.data_ptr(), DEVICE)
    assert memory.address <= block.data_ptr()
    assert block.data_ptr() + block.numel() <= memory.address + memory.num_bytes
    assert memory == export(block.data_ptr(), DEVICE)
    offset = tensor.data_ptr() - memory.address
    contexts = [i == device for i in range(torch.cuda.device_count())]
    assert process.ask(memory, offset, tensor.numel()) == [[content(tensor)], contexts]
    tensor.copy_(random_bytes(tensor.numel()))  # the mapping is reused
    torch.cuda.synchronize()
    assert process.ask(memory, offset, tensor.numel(), close=True) == [[content(tensor)] * 2, contexts]


def test_arena_is_read_and_releases_its_memory(reader):
    process, device = reader
    before = free_bytes()
    arena = DeviceArena(256 * MIB, DEVICE)
    assert before - free_bytes() >= 256 * MIB
    assert (arena.data.shape, arena.data.dtype, arena.data.device) == ((256 * MIB,), torch.uint8, DEVICE)
    contexts = [i == device for i in range(torch.cuda.device_count())]
    for repeat in range(2):
        arena.data.random_(0, 256)
        memory = arena.publish()
        assert memory.num_bytes >= 256 * MIB
        assert memory.address == arena.data.data_ptr()
        assert process.ask(memory, 0, 8 * MIB, close=repeat == 1)[1] == contexts
        assert process.ask(memory, 248 * MIB, 8 * MIB, close=True)[0][0] == content(arena.data[248 * MIB :])
    arena.close()
    assert before - free_bytes() < 64 * MIB  # loaded kernels take some memory


def test_many_mappings_release_their_memory(reader):
    process, _ = reader
    before = None
    for repeat in range(6):
        arena = DeviceArena(64 * MIB, DEVICE)
        arena.data.fill_(repeat)
        found, _ = process.ask(arena.publish(), 0, MIB, close=True)
        assert [total for _, total in found] == [repeat * MIB] * 2
        arena.close()
        before = free_bytes() if repeat == 0 else before
    assert before is not None
    assert before - free_bytes() < 64 * MIB


def test_memory_of_the_own_process_is_not_mapped_again():
    tensor = random_bytes(4 * MIB)
    memory = export(tensor.data_ptr() + 5, DEVICE)
    mapped = ImportedMemory(memory, DEVICE)
    assert mapped.address == memory.address
    mapped.close()
    assert tensor.long().sum().item() > 0
    with pytest.raises(RuntimeError, match="cannot map memory of the same process on GPU elsewhere"):
        ImportedMemory(replace(memory, device_uuid="elsewhere"), DEVICE)


def test_every_allocation_has_its_own_buffer_id():
    seen = []
    for _ in range(3):  # CUDA reuses the address
        arena = DeviceArena(64 * MIB, DEVICE)
        seen.append(arena.publish())
        assert arena.publish() == seen[-1]
        arena.close()
    assert len({memory.buffer_id for memory in seen}) == 3
    assert {memory.pid for memory in seen} == {os.getpid()}


def test_host_memory_is_refused():
    with pytest.raises(NotExportableError, match=r"cannot be shared .* only this process's memory .*: CUDA_ERROR_"):
        export(torch.zeros(10).data_ptr(), DEVICE)


ENDED = """
import json, torch
from dataclasses import asdict
from tidemill_weight_update.cuda_memory import export
tensor = torch.zeros(1 << 20, device="cuda:0")
memory = export(tensor.data_ptr(), tensor.device)
print(json.dumps(asdict(memory)))
"""


def test_memory_of_an_exited_process_is_an_error_with_cuda_error_name(reader):
    process, device = reader
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, check=True)
    fields = json.loads(done.stdout)
    memory = DeviceMemory(**fields)
    message = process.ask(memory, 0, MIB)
    assert message.startswith(f"cuda:{device} cannot map {memory.num_bytes} bytes of process {memory.pid} on GPU")
    assert "CUDA_ERROR_" in message


def test_arena_larger_than_gpu_memory_is_refused():
    with pytest.raises(RuntimeError, match=r"bucket of .* reduce bucket_bytes.*: CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceArena(1 << 50, DEVICE)


EXPANDABLE = """
import torch
from tidemill_weight_update.cuda_memory import DeviceArena, NotExportableError, export
device = torch.device("cuda", 0)
try:
    export(torch.zeros(1 << 20, device=device).data_ptr(), device)
except NotExportableError as error:
    print(error)
arena = DeviceArena(1 << 20, device)
print(arena.publish().num_bytes >= 1 << 20)
"""


def test_expandable_segments_are_not_exportable_but_an_arena_is():
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", EXPANDABLE]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    refused, arena = done.stdout.splitlines()
    assert "not that of torch's expandable_segments" in refused
    assert "CUDA_ERROR_" in refused
    assert arena == "True"
