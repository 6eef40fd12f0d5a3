"""LoRA adapters: config, names, merging, and updates of toy engines."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lora_engine import CONFIG, HIDDEN, AdapterEngine, adapter, base, merged
from tidemill_testing import run_ranks
from tidemill_weight_update import BucketHandle, GroupLink, LocalShard, LoraConfig, WeightUpdater, merge_lora
from torch import Tensor, nn

PEFT = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": {"v_proj", "q_proj"}, "bias": "none"}


def test_peft_config_is_read():
    config = LoraConfig.from_peft(PEFT | {"modules_to_save": None, "rank_pattern": {}, "use_dora": False})
    assert config == LoraConfig(r=8, lora_alpha=16, target_modules=("q_proj", "v_proj"))
    assert config.scale == 2.0
    assert config.to_sglang() == {
        **{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"},
        "target_modules": ["q_proj", "v_proj"],
    }


def test_scale_of_rank_stabilized_lora_is_passed_to_sglang():
    config = LoraConfig.from_peft(PEFT | {"use_rslora": True})
    assert config.scale == 16 / math.sqrt(8)
    message = config.to_sglang()
    assert message["lora_alpha"] / message["r"] == pytest.approx(config.scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "expected peft_type 'LORA', got 'IA3'"),
        ({"use_dora": True}, "unsupported adapter setting use_dora=True"),
        ({"use_qalora": True}, "unsupported adapter setting use_qalora=True"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens="),
        ({"trainable_token_indices": [7]}, "trainable_token_indices="),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "unsupported adapter setting bias='all'"),
        ({"target_modules": "all-linear"}, "must be a list of names"),
        ({"target_modules": None}, "expected the adapter setting 'target_modules', got none"),
        ({"r": 0}, "r must be positive"),
    ],
)
def test_unsupported_peft_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig.from_peft(PEFT | change)


def test_peft_options_that_are_missing_are_named():
    for key in ("r", "lora_alpha", "target_modules"):
        with pytest.raises(ValueError, match=f"expected the adapter setting '{key}', got none"):
            LoraConfig.from_peft({name: value for name, value in PEFT.items() if name != key})


class LoraLinear(nn.Linear):
    """The paper's layer: h = W x + scale * B A x."""

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight.data, self.a, self.b, self.scale = weight, a, b, scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * (x @ self.a.T) @ self.b.T


def test_merged_layer_computes_the_same_as_the_adapter():
    weights, matrices = base(torch.float64), dict(adapter(1, torch.float64))
    got = dict(merge_lora(weights.items(), matrices.items(), CONFIG))
    assert list(got) == list(weights)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    for name in (name for name in weights if "proj" in name):
        a, b = (matrices[f"base_model.model.{name.removesuffix('weight')}lora_{m}.weight"] for m in "AB")
        torch.testing.assert_close(x @ got[name].T, LoraLinear(weights[name], a, b, CONFIG.scale)(x))
    assert got["norm.weight"] is weights["norm.weight"]


def test_bfloat16_merge_is_rounded_once():
    weights, matrices = base(torch.bfloat16), adapter(1, torch.bfloat16)
    wide = {name: tensor.double() for name, tensor in weights.items()}
    exact = merged(wide, [(name, tensor.double()) for name, tensor in matrices])
    got = dict(merge_lora(weights.items(), matrices, CONFIG))
    for name, tensor in got.items():
        assert tensor.dtype == torch.bfloat16
        assert (tensor.double() - exact[name]).abs().max() <= exact[name].abs().max() * 2**-8


def test_peft_parameter_names_are_accepted():
    """Including the adapter's own matrices among the tensors of the model."""
    weights, matrices = base(), adapter(1)
    live = {f"base_model.model.{n.replace('_proj.', '_proj.base_layer.')}": t for n, t in weights.items()}
    named = [(name.replace(".weight", ".default.weight"), tensor) for name, tensor in matrices]
    got = dict(merge_lora((live | dict(named)).items(), iter(named), CONFIG))
    wanted = dict(merge_lora(weights.items(), matrices, CONFIG))
    assert list(got) == list(wanted)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_merge_is_lazy():
    asked: list[str] = []

    def watched():
        for name, tensor in base().items():
            asked.append(name)
            yield name, tensor

    merging = merge_lora(watched(), adapter(1), CONFIG)
    assert asked == []
    next(merging)
    assert len(asked) == 1


def changed_adapter(change: str) -> list[tuple[str, Tensor]]:
    items = adapter(1)
    (name, tensor), rest = items[0], items[1:]
    return {
        "lone": rest,
        "shape": [(name, tensor[1:]), *rest],
        "name": [(name.replace("lora_A", "lora_embedding_A"), tensor), *rest],
        "module": [(name.replace("q_proj", "gate"), tensor), *rest],
        "twice": [*items, (name, tensor)],
        "two adapters": [*items, (name.replace(".weight", ".other.weight"), tensor)],
        "shard": [(name, LocalShard(tensor=tensor, global_shape=tuple(tensor.shape), start=(0, 0))), *rest],
        "empty": [],
        "nan": [(name, torch.full_like(tensor, float("nan"))), *rest],
    }[change]


BAD_ADAPTERS = {
    "lone": (ValueError, r"lacks 'base_model\.model\.layers\.0\.q_proj\.lora_A\.weight'"),
    "shape": (ValueError, r"must have the shape \(r, inputs\) with r=4, got \(3, 8\)"),
    "name": (ValueError, "expected the name of a LoRA matrix"),
    "module": (ValueError, r"belongs to no module in target_modules"),
    "twice": (ValueError, "was passed twice"),
    "two adapters": (ValueError, "matrix A of 'layers.0.q_proj' was passed twice; pass one adapter at a time"),
    "shard": (TypeError, "is a LocalShard"),
    "empty": (ValueError, "empty iterable"),
}


@pytest.mark.parametrize("change", BAD_ADAPTERS)
def test_adapter_that_does_not_match_its_config_is_refused_by_name(change):
    error, message = BAD_ADAPTERS[change]
    with pytest.raises(error, match=message):
        merge_lora(base().items(), changed_adapter(change), CONFIG)
    engine = AdapterEngine()
    with pytest.raises(error, match=message):
        WeightUpdater([engine]).update_adapter(changed_adapter(change), "policy", CONFIG, 1)
    assert (engine.calls, engine.version) == ([], "first")


def test_peft_config_in_place_of_a_lora_config_is_refused():
    peft_config = SimpleNamespace(r=4, lora_alpha=8, target_modules={"q_proj"}, use_rslora=False)
    with pytest.raises(TypeError, match=r"config must be a LoraConfig of .*use LoraConfig\.from_peft"):
        merge_lora(base().items(), adapter(1), peft_config)
    engine = AdapterEngine()
    with pytest.raises(TypeError, match=r"config must be a LoraConfig of .*use LoraConfig\.from_peft"):
        WeightUpdater([engine]).update_adapter(adapter(1), "policy", peft_config, 1)
    assert (engine.calls, engine.version) == ([], "first")


def test_dict_in_place_of_pairs_is_refused():
    with pytest.raises(TypeError, match=r"expected \(name, tensor\) pairs, .*; for a dict pass .items\(\)"):
        list(merge_lora(base(), adapter(1), CONFIG))


def test_adapter_of_another_model_is_refused():
    lacking = {name: tensor for name, tensor in base().items() if "layers.1" not in name}
    with pytest.raises(ValueError, match=r"layers that the model does not have: 'layers.1.q_proj'"):
        list(merge_lora(lacking.items(), adapter(1), CONFIG))
    engine = AdapterEngine()
    with pytest.raises(ValueError, match=r"layers that the model does not have: 'layers.1.q_proj'"):
        WeightUpdater([engine]).update(lambda: merge_lora(lacking.items(), adapter(1), CONFIG), 1)
    assert (engine.calls, engine.version) == ([], "first")
    with pytest.raises(ValueError, match=r"expects 'layers.0.q_proj.weight' with shape \(8, 8\), got \(8, 7\)"):
        list(merge_lora((base() | {"layers.0.q_proj.weight": torch.zeros(8, 7)}).items(), adapter(1), CONFIG))


def test_adapter_is_replaced_under_the_same_name():
    engine = AdapterEngine()
    updater = WeightUpdater([engine])
    for version in (1, 2):
        stats = updater.update_adapter(iter(adapter(version)), "policy", CONFIG, version)
        assert engine.loaded() == {"policy": dict(adapter(version))}
        assert engine.version == stats.weight_version == str(version)
        assert (stats.num_tensors, stats.num_buckets, stats.verified, stats.quarantined) == (8, 1, False, {})
        assert stats.num_bytes == sum(tensor.nbytes for _, tensor in adapter(version))
    assert engine.calls == ["load policy", "version 1", "unload policy", "load policy", "version 2"]


def test_new_adapter_is_loaded_before_the_replaced_one_is_unloaded():
    engine = AdapterEngine()
    updater = WeightUpdater([engine], in_flight="abort")
    updater.update_adapter(adapter(1), "policy-1", CONFIG, 1)
    engine.calls.clear()
    updater.update_adapter(adapter(2), "policy-2", CONFIG, 2, replaces="policy-1")
    assert engine.calls == ["pause abort", "load policy-2", "unload policy-1", "version 2", "resume"]
    assert list(engine.loaded()) == ["policy-2"]


def test_memory_of_a_loaded_adapter_is_not_overwritten():
    """SGLang uses adapter tensors without a copy where it can."""
    engine = AdapterEngine()
    updater = WeightUpdater([engine])
    updater.update_adapter(adapter(1), "one", CONFIG, 1)
    updater.update_adapter(adapter(2), "two", CONFIG, 2)
    updater.close()
    assert engine.loaded() == {"one": dict(adapter(1)), "two": dict(adapter(2))}


def test_adapter_is_sent_as_bytes_with_a_link():
    """An engine on another machine can open the trainer's memory as little as one that loads after the update."""
    loads = []

    class LateEngine(AdapterEngine):
        def load_adapter(self, name: str, config: LoraConfig, bucket: BucketHandle) -> None:
            loads.append(partial(super().load_adapter, name, config, bucket))

    engine = LateEngine()
    WeightUpdater([engine], link=GroupLink()).update_adapter(adapter(1), "policy", CONFIG, 1)
    for load in loads:
        load()
    assert engine.loaded() == {"policy": dict(adapter(1))}


def test_adapter_is_cast_and_must_be_finite():
    engine = AdapterEngine()
    updater = WeightUpdater([engine], dtype=torch.bfloat16)
    updater.update_adapter(adapter(1), "policy", CONFIG, 1)
    assert engine.loaded() == {"policy": {name: tensor.bfloat16() for name, tensor in adapter(1)}}
    with pytest.raises(
        ValueError, match=r"NaN elements: 'base_model.model.layers.0.q_proj.lora_A.weight' \(1 in total\)"
    ):
        updater.update_adapter(changed_adapter("nan"), "policy", CONFIG, 2)
    assert engine.version == "1"
    WeightUpdater([engine], allow_non_finite=True).update_adapter(changed_adapter("nan"), "policy", CONFIG, 3)


def test_failed_engine_is_excluded_until_it_is_readmitted():
    good, bad = AdapterEngine("good"), AdapterEngine("bad")
    updater = WeightUpdater([good, bad])
    updater.update_adapter(adapter(1), "policy", CONFIG, 1)
    bad.refuses = "rank 4 is larger than --max-lora-rank"
    stats = updater.update_adapter(adapter(2), "policy", CONFIG, 2)
    assert stats.quarantined == {"engine 1 of 2 (bad)": bad.refuses}
    assert (good.version, bad.version, bad.loaded(), bad.paused) == ("2", "1", {}, None)
    bad.refuses, calls = None, len(bad.calls)
    assert updater.update_adapter(adapter(3), "policy", CONFIG, 3).quarantined == {}
    assert len(bad.calls) == calls  # left out
    updater.readmit([bad], base().items(), 3)
    updater.update_adapter(adapter(4), "policy", CONFIG, 4)
    assert good.loaded() == bad.loaded() == {"policy": dict(adapter(4))}
    assert (good.version, bad.version) == ("4", "4")


class VersionFails(AdapterEngine):
    """Engine that fails when its version is set, or read."""

    fails = ""

    def set_weight_version(self, version: str) -> None:
        if self.fails == "set":
            raise RuntimeError("no answer")
        super().set_weight_version(version)

    def get_weight_version(self) -> str:
        if self.fails == "read":
            raise RuntimeError("no answer")
        return super().get_weight_version()


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
@pytest.mark.parametrize("fails", ["set", "read"])
def test_engine_that_cannot_set_the_version_keeps_running(fails, in_flight):
    """Its weights are unchanged, so it is not paused."""
    good, bad = AdapterEngine("good"), VersionFails("bad")
    updater = WeightUpdater([good, bad], in_flight=in_flight)
    bad.fails = fails
    assert updater.update_adapter(adapter(1), "policy", CONFIG, 1).quarantined == {"engine 1 of 2 (bad)": "no answer"}
    assert (bad.paused, good.version) == (None, "1")
    bad.fails = ""
    updater.readmit([bad], base().items(), 2)
    assert updater.update_adapter(adapter(2), "policy", CONFIG, 2).quarantined == {}
    assert (bad.paused, bad.version, bad.loaded()) == (None, "2", {"policy": dict(adapter(2))})


def test_quarantined_engine_needs_weights_before_adapters():
    good, bad = AdapterEngine("good"), AdapterEngine("bad")
    updater = WeightUpdater([good, bad])
    bad.refuses = "no"
    assert list(updater.update(base().items(), 1).quarantined) == ["engine 1 of 2 (bad)"]
    bad.refuses = None
    assert updater.update_adapter(adapter(1), "policy", CONFIG, 2).quarantined == {}
    assert (bad.loaded(), bad.paused) == ({}, "abort")
    updater.readmit([bad], base().items(), 1)
    assert bad.loaded() == {}  # it missed the adapter
    updater.update_adapter(adapter(3), "policy", CONFIG, 4)
    assert good.loaded() == bad.loaded() == {"policy": dict(adapter(3))}


def test_engine_without_adapter_support_is_refused():
    class Plain:
        has_loader, tp_size = False, 1

    with pytest.raises(RuntimeError, match="Plain cannot load adapters; implement"):
        WeightUpdater([Plain()]).update_adapter(adapter(1), "policy", CONFIG, 1)


def _sharded() -> tuple[bool, bool, str]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layouts = [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Replicate()]]
    weights = {
        name: distribute_tensor(tensor, mesh, layouts[i % 3]) if tensor.ndim == 2 else tensor
        for i, (name, tensor) in enumerate(base().items())
    }
    held = [(name, distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])) for name, tensor in adapter(1)]
    wanted = merged(base(), adapter(1))
    is_merged = True
    for matrices in (held, adapter(1)):
        for name, tensor in merge_lora(weights.items(), matrices, CONFIG):
            if isinstance(tensor, DTensor):
                assert tensor.placements == weights[name].placements
                tensor = tensor.full_tensor()
            is_merged &= torch.allclose(tensor, wanted[name], atol=1e-6)
    engine = AdapterEngine()
    updater = WeightUpdater([engine] if dist.get_rank() == 0 else [])
    updater.update_adapter(held, "policy", CONFIG, 1)
    is_sent = dist.get_rank() > 0 or engine.loaded() == {"policy": dict(adapter(1))}
    try:
        updater.update_adapter(changed_adapter("lone") if dist.get_rank() == 1 else held, "policy", CONFIG, 2)
    except (ValueError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    return is_merged, is_sent and engine.version != "2", message


def test_sharded_weights_and_adapters():
    for rank, (is_merged, is_sent, message) in enumerate(run_ranks(_sharded, 4)):
        assert is_merged
        assert is_sent
        assert message.startswith(
            "ValueError: the adapter lacks" if rank == 1 else "RuntimeError: weight update failed on"
        )
