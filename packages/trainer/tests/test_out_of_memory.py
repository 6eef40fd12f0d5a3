"""Messages about devices whose memory is full, for errors as torch and SGLang report them."""

import pytest
from tidemill_dispatch import WorkerDiedError, WorkerError
from tidemill_testing import tiny_model
from tidemill_trainer.checkpoints import CheckpointError
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import read_config
from tidemill_trainer.out_of_memory import ENGINE_STARTS, DeviceMemoryError, check_device_memory
from tidemill_trainer.sft.config import SFTConfig

# of torch 2.11 on an H100 that an engine shares
OF_TORCH = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is "
    "free. Process 4711 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has 38.09 GiB memory "
    "in use. Of the allocated memory 36.55 GiB is allocated by PyTorch, and 519.03 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=1000)


@pytest.fixture
def config(path, tmp_path):
    def make(*overrides, kind=Config):
        (tmp_path / "run.toml").write_text(f'[model]\npath = "{path}"\n')
        return read_config(kind, tmp_path / "run.toml", overrides, has_gpu=False)

    return make


def failure(method, message=OF_TORCH, *, group="actor", kind="torch.OutOfMemoryError", trace=""):
    return WorkerError(
        group=group,
        rank=1,
        host="node:7",
        method=method,
        error_type=kind,
        error_message=message,
        remote_traceback=trace,
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            "infer",
            r"out of memory in the log-probs, on rank 1 .*GPU 0 .*in log-probs is .* engine\.max_token_len_per_gpu",
        ),
        ("update_actor", r"in the update of the policy, .*Process 4711 has 40\.00 GiB.*in forward/backward is policy "),
        ("update_actor", r"policy activations .* lower engine\.max_token_len_per_gpu, or set model\.gradient_checkp"),
        ("update_weights", r"out of memory in the weight update, .*lower weight_update\.bucket_bytes"),
    ],
)
def test_message_names_phase_holders_and_keys(config, tmp_path, method, expected):
    with pytest.raises(DeviceMemoryError, match=rf"(?s){expected}") as raised:
        check_device_memory(failure(method), config("engine.max_token_len_per_gpu=65536"), tmp_path)
    assert "PYTORCH_ALLOC_CONF" not in str(raised.value)


def test_return_of_offloaded_tensors_is_named(config, tmp_path):
    trace = 'File "offload.py", line 58, in onload\n    storage.resize_(num_bytes)'
    with pytest.raises(DeviceMemoryError, match="update of the policy, while offloaded tensors were copied back"):
        check_device_memory(failure("update_actor", trace=trace), config(), tmp_path)


def test_cause_of_a_checkpoint_error_and_of_supervised_fine_tuning_is_found(config, tmp_path):
    error = CheckpointError("cannot save step 3")
    error.__cause__ = failure("save_hf")
    with pytest.raises(DeviceMemoryError, match="out of memory in the checkpoint"):
        check_device_memory(error, config(), tmp_path)
    with pytest.raises(
        DeviceMemoryError, match=r"(?s)in the update of the policy, .*lower engine\.max_token_len_per_gpu"
    ):
        check_device_memory(failure("update_sft", "CUDA out of memory."), config(kind=SFTConfig), tmp_path)


def test_other_errors_are_left_alone(config, tmp_path):
    check_device_memory(None, config(), tmp_path)
    check_device_memory(ValueError("out of memory"), config(), tmp_path)  # of the driver
    check_device_memory(failure("infer", "expected 3 rows, got 2", kind="ValueError"), config(), tmp_path)
    killed_by_ray = "Task was killed due to the node running low on memory. Memory on the node was 23.1GB / 24GB"
    check_device_memory(failure("infer", killed_by_ray, kind="OutOfMemoryError"), config(), tmp_path)
    before = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB."
    smaller = "Available memory 2 GiB is less than 3 GiB, reducing max_m to 4096 to avoid out of memory"
    (tmp_path / "rollout_0.log").write_text(f"{before}\n{ENGINE_STARTS}\n{smaller}\na port is in use\n")
    check_device_memory(failure("start_engine", "died", group="rollout_0", kind="RuntimeError"), config(), tmp_path)


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            r"take 30\.0% of a GPU \(rollout\.mem_fraction_static\); raise it, or rollout\.tensor",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB.",
            r"take 30\.0% of a GPU \(rollout\.mem_fraction_static\); lower it or .*_total_tokens, .* else uses",
        ),
    ],
)
@pytest.mark.parametrize("died", [True, False])
def test_engine_without_memory_names_the_key_from_its_log(config, tmp_path, line, keys, died):
    log = tmp_path / "rollout_0.log"
    log.write_text(f"{ENGINE_STARTS}\nLoad weight end.\n{line}\nReceived sigquit from a child process.\n")
    error = failure("start_engine", "Rank 0 scheduler died", group="rollout_0", kind="RuntimeError")
    if died:
        error = WorkerDiedError(group="rollout_0", rank=0, host="node:7", method="start_engine", reason="exited")
    with pytest.raises(DeviceMemoryError, match=rf"(?s)in the engine rollout_0 \(SGLang\): .*memory.*{keys}.*_0\.log"):
        check_device_memory(error, config("rollout.mem_fraction_static=0.3"), tmp_path)
