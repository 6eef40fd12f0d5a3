import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import tidemill_engines
from tidemill_engines import (
    BaseEngine,
    CheckpointConfig,
    EngineRegistry,
    FSDP2Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParamGroup,
)
from tidemill_engines.megatron.config import MegatronConfig


def test_public_names_are_unchanged():
    assert tidemill_engines.__all__ == [
        "BaseEngine",
        "CheckpointConfig",
        "EngineConfig",
        "EngineRegistry",
        "FSDP2Config",
        "LoraConfig",
        "LossFn",
        "MegatronConfig",
        "Metric",
        "ModelConfig",
        "ModelOutput",
        "Normalizer",
        "OptimizerConfig",
        "ParamGroup",
        "ValueOutput",
        "WeightShard",
        "sft_loss",
    ]
    assert all(name in vars(tidemill_engines) for name in tidemill_engines.__all__)


FRESH_PROCESS = """
import sys
import tidemill_engines
from transformers import AttentionInterface

# the parts that import transformers or a backend, which a process that only makes configs does not pay for
heavy = tuple(f"tidemill_engines.{name}" for name in ("fsdp2.engine", "attention.packed", "megatron.engine"))
print([name for name in sys.modules if name.startswith((*heavy, "megatron"))])
print("tidemill_varlen" in AttentionInterface()._global_mapping)
sys.modules["megatron"] = None  # as if it were not installed
tidemill_engines.EngineRegistry.new(
    model_type="language_model",
    backend="megatron",
    model=tidemill_engines.ModelConfig(path="x"),
    engine=tidemill_engines.MegatronConfig(device="cpu"),
)
"""


def test_import_loads_no_backend_and_missing_backend_names_extra():
    run = subprocess.run([sys.executable, "-c", FRESH_PROCESS], capture_output=True, text=True, timeout=200)
    assert run.stdout == "[]\nFalse\n"
    assert run.returncode == 1
    assert "ImportError" in run.stderr
    assert "pip install 'tidemill-engines[megatron]'" in run.stderr


def new_engine(**names):
    return EngineRegistry.new(model=ModelConfig(path="x"), engine=FSDP2Config(device="cpu"), **names)


def test_registry_lists_engines_and_rejects_duplicates():
    assert ("language_model", "fsdp2", "cuda") in EngineRegistry.names()
    with pytest.raises(
        ValueError,
        match=r"model_type='language_model', backend='nothing', device='cpu'.*'language_model', 'fsdp2', 'cpu'",
    ):
        new_engine(model_type="language_model", backend="nothing")
    before = EngineRegistry.names()
    with pytest.raises(ValueError, match=r"device='cpu' is registered already .*_fsdp2_language_model"):
        EngineRegistry.register("language_model", "fsdp2", devices=("tpu", "cpu"))(lambda: BaseEngine)
    assert EngineRegistry.names() == before


def test_registry_returns_factory_and_calls_it_lazily(monkeypatch):
    from tidemill_engines import registry

    monkeypatch.setattr(registry, "_entries", {})
    calls = []

    def factory():
        calls.append(1)
        return lambda **configs: configs

    assert EngineRegistry.register("toy", "here", devices=("cpu",))(factory) is factory
    assert not calls
    assert new_engine(model_type="toy", backend="here") == {
        "model": ModelConfig(path="x"),
        "engine": FSDP2Config(device="cpu"),
        "optimizer": None,
        "checkpoint": CheckpointConfig(),
    }
    with pytest.raises(ValueError, match="device='cuda'"):
        EngineRegistry.new(
            model_type="toy", backend="here", model=ModelConfig(path="x"), engine=FSDP2Config(device="cuda")
        )


def test_registry_names_missing_extra(monkeypatch):
    from tidemill_engines import registry

    monkeypatch.setattr(registry, "_entries", {})

    def factory():
        import a_package_that_is_not_there  # noqa: F401

    EngineRegistry.register("toy", "here", extra="toy-engines[here]")(factory)
    with pytest.raises(ImportError, match=r"requires a_package_that_is_not_there; .*pip install 'toy-engines\[here\]'"):
        new_engine(model_type="toy", backend="here")
    EngineRegistry.register("toy", "there")(factory)
    with pytest.raises(ModuleNotFoundError):
        new_engine(model_type="toy", backend="there")


def test_base_engine_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        BaseEngine(model=ModelConfig(path="x"), engine=FSDP2Config(), optimizer=None, checkpoint=CheckpointConfig())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(path="x", dtype="int8"), "ModelConfig.dtype must be one of float32, .*'int8'"),
        (lambda: FSDP2Config(device="tpu"), "FSDP2Config.device must be one of auto, cpu, cuda"),
        (lambda: FSDP2Config(param_dtype="float16"), "param_dtype"),
        (lambda: FSDP2Config(reduce_dtype="x"), "reduce_dtype"),
        (lambda: FSDP2Config(fsdp_size=0), "fsdp_size must be at least 1; got 0"),
        (lambda: FSDP2Config(max_token_len_per_gpu=0), "max_token_len_per_gpu must be at least 1"),
        (lambda: FSDP2Config(micro_batch_size_per_gpu=0), "micro_batch_size_per_gpu must be at least 1"),
        (lambda: FSDP2Config(timeout_s=0), "timeout_s must be above 0"),
        (lambda: OptimizerConfig(lr=-1.0), "lr must be at least 0"),
        (lambda: OptimizerConfig(betas=(0.9, 1.5)), "betas must be between 0.0 and 1.0; got 1.5"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), r"betas must be two numbers below 1; got \(0.9, 1.0\)"),
        (lambda: OptimizerConfig(betas=(0.9, 0.99, 0.999)), "betas must be two numbers below 1"),
        (lambda: OptimizerConfig(lr_scheduler="step"), "lr_scheduler must be one of constant, linear, cosine, wsd"),
        (lambda: OptimizerConfig(lr_scheduler="cosine"), "'cosine' requires total_steps"),
        (lambda: OptimizerConfig(lr_scheduler="linear", total_steps=5, lr_warmup_steps=5), "above lr_warmup_steps"),
        (lambda: OptimizerConfig(nonfinite="ignore"), "nonfinite must be one of skip, raise"),
        (lambda: ParamGroup(pattern="x", lr_ratio=-1.0), "lr_ratio must be at least 0"),
        (lambda: ParamGroup(pattern="x", weight_decay=-1.0), "weight_decay must be at least 0"),
        (lambda: OptimizerConfig(clip_grad=0), "clip_grad must be above 0; got 0"),
        (lambda: LoraConfig(rank=0), "rank must be at least 1"),
        (lambda: LoraConfig(alpha=float("nan")), "LoraConfig.alpha must be above 0; got nan"),
        (lambda: LoraConfig(alpha=0), "LoraConfig.alpha must be above 0; got 0"),
        (lambda: LoraConfig(target_modules=()), "must name at least one module"),
        (lambda: ModelConfig(path="x", recompute="some"), "recompute must be one of full, selective"),
        (lambda: ModelConfig(path="x", lora=LoraConfig(), frozen=("a",)), "freezes all of the model already"),
        (lambda: FSDP2Config(peak_tflops=0.0), "peak_tflops must be above 0"),
        (lambda: CheckpointConfig(keep_last=0), "keep_last must be at least 1"),
        (lambda: OptimizerConfig(min_lr_ratio=2.0), "min_lr_ratio must be between 0.0 and 1.0"),
    ],
)
def test_out_of_range_settings_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_string_for_number_is_rejected():
    with pytest.raises(TypeError, match=r"OptimizerConfig.lr must be a number; got '1e-6'"):
        OptimizerConfig(lr="1e-6")  # as YAML reads it


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(lr_warmup_steps=2.5), "lr_warmup_steps must be a whole number; got 2.5"),
        (lambda: FSDP2Config(max_token_len_per_gpu=1e4), "max_token_len_per_gpu must be a whole number; got 10000.0"),
        (lambda: MegatronConfig(tensor_model_parallel_size="2"), "parallel_size must be a whole number; got '2'"),
        (lambda: LoraConfig(target_modules="q_proj"), r"target_modules .* got 'q_proj', write \('q_proj',\)"),
        (lambda: ModelConfig(path="x", frozen="model.*"), r"frozen must be a tuple of names; got 'model\.\*'"),
        (lambda: FSDP2Config(wrap_classes="Layer"), "wrap_classes must be a tuple of names; got 'Layer'"),
    ],
)
def test_settings_of_wrong_type_are_rejected(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_registry_requires_config_objects():
    settings = {"model_type": "language_model", "backend": "fsdp2", "model": ModelConfig(path="x")}
    settings["engine"] = FSDP2Config(device="cpu")
    for wrong, message in (
        ({"model": "x"}, "model must be of type ModelConfig; got 'x'"),
        ({"engine": {}}, r"engine must be the configuration of the backend, such as FSDP2Config\(\); got {}"),
        ({"optimizer": {"lr": 1}}, "optimizer must be of type OptimizerConfig; got {'lr': 1}"),
    ):
        with pytest.raises(TypeError, match=message):
            EngineRegistry.new(**settings | wrong)


def test_configs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        FSDP2Config().device = "cpu"


def test_config_of_another_backend_is_rejected():
    with pytest.raises(TypeError, match="engine of FSDP2LanguageModel must be of type FSDP2Config, got MegatronConfig"):
        EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model=ModelConfig(path="x"),
            engine=tidemill_engines.MegatronConfig(device="cpu"),
        )
