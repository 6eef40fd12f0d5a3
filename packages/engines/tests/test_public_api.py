from dataclasses import FrozenInstanceError

import pytest
import tidemill_engines
from tidemill_engines import BaseEngine, EngineConfig, EngineRegistry, ModelConfig, OptimizerConfig
from tidemill_testing import run_ranks


def test_all_is_pinned():
    assert tidemill_engines.__all__ == [
        "BaseEngine",
        "EngineConfig",
        "EngineRegistry",
        "LossFn",
        "Metric",
        "ModelConfig",
        "ModelOutput",
        "Normalizer",
        "OptimizerConfig",
        "sft_loss",
    ]
    assert all(name in vars(tidemill_engines) for name in tidemill_engines.__all__)


def run_import():
    import sys

    import tidemill_engines  # noqa: F401
    from transformers import AttentionInterface

    # the parts that import transformers or a backend, which a process that only makes configs does not pay for
    heavy = [name for name in sys.modules if name.startswith(("tidemill_engines.fsdp2", "tidemill_engines.attention"))]
    return heavy, "tidemill_varlen" in AttentionInterface()._global_mapping


def test_importing_registers_no_attention_and_loads_no_backend():
    assert run_ranks(run_import, 1) == [([], False)]


def test_the_registry_names_what_it_knows_and_refuses_duplicates():
    assert ("language_model", "fsdp2") in EngineRegistry.names()
    with pytest.raises(ValueError, match=r"model_type='language_model', backend='nothing'.*'language_model', 'fsdp2'"):
        EngineRegistry.new(
            model_type="language_model", backend="nothing", model=ModelConfig(path="x"), engine=EngineConfig()
        )
    with pytest.raises(ValueError, match="registered already"):
        EngineRegistry.register("language_model", "fsdp2")(lambda: BaseEngine)


def test_the_registry_returns_what_it_decorates_and_calls_it_late(monkeypatch):
    from tidemill_engines import registry

    monkeypatch.setattr(registry, "_factories", {})
    calls = []

    def factory():
        calls.append(1)
        return lambda **configs: configs

    assert EngineRegistry.register("toy", "here")(factory) is factory
    assert not calls
    model, engine = ModelConfig(path="x"), EngineConfig()
    made = EngineRegistry.new(model_type="toy", backend="here", model=model, engine=engine)
    assert made == {"model": model, "engine": engine, "optimizer": None}


def test_base_engine_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        BaseEngine(model=ModelConfig(path="x"), engine=EngineConfig(), optimizer=None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(path="x", dtype="int8"), "ModelConfig.dtype must be one of float32, .*'int8'"),
        (lambda: EngineConfig(device="tpu"), "EngineConfig.device must be one of auto, cpu, cuda"),
        (lambda: EngineConfig(param_dtype="float16"), "param_dtype"),
        (lambda: EngineConfig(reduce_dtype="x"), "reduce_dtype"),
        (lambda: EngineConfig(fsdp_size=0), "fsdp_size must be at least 1; got 0"),
        (lambda: EngineConfig(max_token_len_per_gpu=0), "max_token_len_per_gpu must be at least 1"),
        (lambda: EngineConfig(micro_batch_size_per_gpu=0), "micro_batch_size_per_gpu must be at least 1"),
        (lambda: EngineConfig(timeout_s=0), "timeout_s must be above 0"),
        (lambda: OptimizerConfig(lr=-1.0), "lr must be at least 0"),
        (lambda: OptimizerConfig(betas=(0.9, 1.5)), "betas must be between 0.0 and 1.0; got 1.5"),
        (lambda: OptimizerConfig(lr_scheduler="step"), "lr_scheduler must be one of constant, linear, cosine"),
        (lambda: OptimizerConfig(lr_scheduler="cosine"), "'cosine' needs total_steps"),
        (lambda: OptimizerConfig(lr_scheduler="linear", total_steps=5, lr_warmup_steps=5), "above lr_warmup_steps"),
        (lambda: OptimizerConfig(min_lr_ratio=2.0), "min_lr_ratio must be between 0.0 and 1.0"),
    ],
)
def test_bad_configs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        EngineConfig().device = "cpu"
