"""Loading weights by slices: equal to from_pretrained, a part per rank, mismatches are rejected."""

import json
import os
from itertools import chain
from pathlib import Path

import pytest
import torch
from engine_cases import VOCAB, build_engine, full, make_batch, plain_model, weights_of
from safetensors.torch import load_file, save_file
from tidemill_engines.fsdp2.weights import local_box
from tidemill_engines.hf_weights.layout import Piece
from tidemill_engines.hf_weights.safetensors_files import SafetensorsFiles
from tidemill_engines.hf_weights.shard import WeightShard
from tidemill_testing import run_ranks, tiny_model

MOE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}


def moe_model(path: Path, **save) -> Path:
    import transformers

    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)).save_pretrained(path, **save)
    return path


def reference_state(path, dtype):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.state_dict() | dict(model.named_buffers())


def run_load(cases):
    """Return the tensors that differ from from_pretrained, and whether tied weights are one tensor."""
    out = []
    for path, settings in cases:
        dtype = settings.get("model", {}).get("dtype", "float32")
        engine = build_engine(path, **settings)
        expected = reference_state(path, getattr(torch, dtype))
        state = engine.model.state_dict() | dict(engine.model.named_buffers())
        actual = {name: full(tensor) for name, tensor in state.items()}
        differs = sorted(expected.keys() ^ actual.keys())
        for name in expected.keys() & actual.keys():
            same = actual[name].dtype == expected[name].dtype and torch.equal(actual[name], expected[name])
            differs += [] if same else [name]
        out.append((differs, engine.model.get_input_embeddings().weight is engine.model.lm_head.weight))
        engine.close()
    return out


@pytest.mark.parametrize("world_size", [1, 3])  # 3 divides neither layers, vocabulary, nor experts
def test_weights_and_buffers_equal_from_pretrained(tmp_path, world_size):
    cases, tied = [], []
    for family in ("qwen2", "qwen3", "llama"):
        for is_tied in (True, False):
            path = tmp_path / f"{family}-{is_tied}"
            cases.append((tiny_model(path, family, vocab_size=VOCAB, tie_word_embeddings=is_tied), {}))
            tied.append(is_tied)
    cases += [
        (moe_model(tmp_path / "moe", max_shard_size="40KB"), {}),
        (cases[0][0], {"model": {"dtype": "bfloat16"}, "reshard_after_forward": False}),
        (tiny_model(tmp_path / "bf16", "llama", vocab_size=VOCAB, dtype=torch.bfloat16), {}),
        (moe_model(tmp_path / "replicated"), {"fsdp_size": 1}),
    ]
    assert len(list((tmp_path / "moe").glob("*.safetensors"))) > 2
    for results in run_ranks(run_load, world_size, cases):
        assert [differs for differs, _ in results] == [[]] * len(cases)
        assert [is_tied for _, is_tied in results] == [*tied, False, True, False, False]


def peak_growth_bytes(load):
    """Measure the growth of the peak resident memory of this process, as reported by the kernel."""

    def status(field: str) -> int:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
        return int(line.split()[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    result = load()
    return status("VmHWM") - before, result


def run_peak(path):
    build_engine(path.parent / "small", optimizer=False).close()  # exclude memory of imports and caches
    sharded, engine = peak_growth_bytes(lambda: build_engine(path, optimizer=False))
    engine.close()
    del engine
    whole = 0
    if os.environ["RANK"] == "0":
        file = path / "model.safetensors"
        whole, _ = peak_growth_bytes(lambda: [tensor.clone() for tensor in load_file(file).values()])
    torch.distributed.barrier()
    return sharded, whole


def test_no_rank_reads_or_holds_the_full_model(tmp_path):
    tiny_model(tmp_path / "small", "llama", vocab_size=VOCAB)
    size = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 3, "head_dim": 128}
    path = tiny_model(tmp_path / "model", "llama", vocab_size=8000, **size)
    num_bytes = (path / "model.safetensors").stat().st_size
    assert num_bytes > 110 << 20
    peaks = run_ranks(run_peak, 4, path)
    assert peaks[0][1] > 1.9 * num_bytes  # the measurement includes file pages and copies
    for sharded, _ in peaks:
        # A quarter of the weights and the pages of the file they come from, of which the kernel maps a few more: it
        # does so in steps of up to 2 MiB. Reading it all would take 5/4 of the weights.
        assert num_bytes / 4 < sharded < 2 * num_bytes / 4 + (32 << 20) < num_bytes


def changed(source: Path, target: Path, change) -> Path:
    """Copy a checkpoint with changed tensors."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def run_refused(paths):
    caught = []
    for path in paths:
        try:
            build_engine(path).close()
            caught.append("")
        except (ValueError, FileNotFoundError) as error:
            caught.append(str(error))
    return caught


def test_mismatched_checkpoints_are_rejected_by_tensor_name(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    experts = moe_model(tmp_path / "moe")
    q = "model.layers.1.self_attn.q_proj.weight"
    cases = [
        (changed(path, tmp_path / "lacks", lambda t: t.pop(q)), f"it lacks {q}"),
        (
            changed(path, tmp_path / "more", lambda t: t.update({"value_head.weight": torch.ones(1)})),
            "the model does not have value_head.weight",
        ),
        (
            changed(path, tmp_path / "shape", lambda t: t.update({q: torch.ones(3, 64)})),
            rf"{q} has shape \[64, 64\] in the model, but the checkpoint has {q} \[3, 64\]",
        ),
        (
            changed(experts, tmp_path / "expert", lambda t: t.pop("model.layers.0.mlp.experts.3.up_proj.weight")),
            r"model.layers.0.mlp.experts.gate_up_proj has shape \[5, 48, 32\] in the model, but the checkpoint has",
        ),
    ]
    no_file = changed(path, tmp_path / "no_file", lambda t: None)
    (no_file / "model.safetensors").unlink()
    cut = changed(path, tmp_path / "cut", lambda t: None)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:5000])
    index = changed(path, tmp_path / "index", lambda t: None)
    names = dict.fromkeys(load_file(index / "model.safetensors"), "model.safetensors")
    absent = names | {q: "model-00002.safetensors"}
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": absent}))
    no_map = changed(path, tmp_path / "no_map", lambda t: None)
    (no_map / "model.safetensors.index.json").write_text("{}")
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    quantized = changed(path, tmp_path / "quantized", lambda t: None)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    cases += [
        (no_file, "expected model.safetensors or model.safetensors.index.json"),
        (cut, "cut/model.safetensors is damaged"),
        (index, "lists model-00002.safetensors, which the folder lacks"),
        (no_map, "model.safetensors.index.json is damaged or not a checkpoint index; download it again: KeyError"),
        (encoder, "encoder contains a t5 model; use a causal language model"),
        (quantized, "is quantized"),
    ]
    for caught in run_ranks(run_refused, 2, [path for path, _ in cases]):
        for (_, message), actual in zip(cases, caught, strict=True):
            with pytest.raises(ValueError, match=message):
                raise ValueError(actual)


def test_tied_head_loads_under_either_name(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    for case in (changed(path, tmp_path / "head", rename), path):
        engine = build_engine(case)
        assert torch.equal(full(engine.model.lm_head.weight), embedding)
        assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
        engine.close()


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_another_head_beside_tied_embeddings_is_refused(tmp_path, monkeypatch, backend):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    monkeypatch.delenv("RANK", raising=False)
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    same = changed(path, tmp_path / "same", lambda t: t.update({"lm_head.weight": embedding.clone()}))
    build_engine(same, backend=backend).close()
    other = changed(path, tmp_path / "other", lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight differ in .*other, but its"):
        build_engine(other, backend=backend)
    build_engine(other, backend=backend, model_type="value_model").close()  # it has no head


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_rotary_frequencies_in_old_checkpoints_are_ignored(tmp_path, monkeypatch, backend):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    monkeypatch.delenv("RANK", raising=False)
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    weights = load_file(path / "model.safetensors")
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]  # as in Llama 2
    old = changed(path, tmp_path / "old", lambda tensors: tensors.update({name: torch.ones(8) for name in names}))
    engine = build_engine(old, backend=backend, optimizer=False)
    loaded = weights_of(engine)
    engine.close()
    assert sorted(loaded) == sorted(weights)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def run_moe_export(path, folder):
    out = []
    for number, settings in enumerate([{}, {"fsdp_size": 1}, {"fsdp_size": 2}]):
        if settings.get("fsdp_size", 1) == 2 and int(os.environ["WORLD_SIZE"]) % 2:
            continue
        engine = build_engine(path, **settings)
        check_shards(engine)
        out.append(weights_of(engine))
        engine.infer_batch(make_batch(3))
        engine.save_hf(folder / str(number))
        engine.close()
    return out


def check_shards(engine):
    """Check that the parts of all ranks are each tensor once per replica, and views of the parameters."""
    storages = {local_box(param)[0].untyped_storage().data_ptr() for param in engine.model.parameters()}
    own, whole = [], dict(engine.get_per_tensor_param())
    for name, shard in engine.get_per_tensor_shards():
        if isinstance(shard, WeightShard):
            assert shard.tensor.untyped_storage().data_ptr() in storages, name
            box = tuple(slice(at, at + size) for at, size in zip(shard.start, shard.tensor.shape, strict=True))
            own.append((name, shard.replica, shard.num_replicas, shard.global_shape, box, shard.tensor.clone()))
        else:
            assert ".experts." not in name
            assert torch.equal(full(shard), full(whole[name]))
    of_ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, own)
    counts, values = {}, {}
    for name, replica, num_replicas, shape, box, tensor in chain.from_iterable(of_ranks):
        assert replica < num_replicas
        counts.setdefault((name, replica), torch.zeros(shape))[box] += 1
        values.setdefault((name, replica), torch.zeros(shape))[box] = tensor
    experts = [name for name in whole if ".experts." in name]
    assert {name for name, _ in counts} == set(experts)
    for name in experts:
        expected = full(whole[name])
        copies = [key for key in counts if key[0] == name]
        assert len(copies) == engine.groups.num_replicas
        for key in copies:
            assert counts[key].eq(1).all(), key
            assert torch.equal(values[key], expected), key


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_fused_experts_are_exported_by_checkpoint_names(tmp_path, world_size):
    path = moe_model(tmp_path / "model")
    original = load_file(path / "model.safetensors")
    assert "model.layers.1.mlp.experts.4.down_proj.weight" in original
    for layouts in run_ranks(run_moe_export, world_size, path, tmp_path):
        for weights in layouts:
            assert sorted(weights) == sorted(original)
            assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())
    for number in range(len(layouts)):
        written = load_file(tmp_path / str(number) / "model.safetensors")
        assert sorted(written) == sorted(original)
        assert all(torch.equal(written[name], tensor) for name, tensor in original.items())


def test_safetensors_slices_are_read_and_a_wrong_index_is_refused(tmp_path):
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(7), "c": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsFiles(tmp_path) as files:
        assert dict(files.shapes) == {"a": (3, 4), "b": (), "c": (0, 2)}
        assert files.read("a", (slice(1, 3), slice(0, 2))).tolist() == [[4.0, 5.0], [8.0, 9.0]]
        assert files.read("b", ()).item() == 7
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"z": "model.safetensors"}}))
    with pytest.raises(ValueError, match=r"lists z in model.safetensors, but that file does not contain it"):
        SafetensorsFiles(tmp_path)


def test_one_file_beside_the_index_of_files_that_it_has_replaced(tmp_path):
    model = plain_model(tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB))
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size="20KB")
    model.save_pretrained(folder)
    assert sorted(file.name for file in folder.glob("model*")) == ["model.safetensors", "model.safetensors.index.json"]
    with SafetensorsFiles(folder) as files:
        assert files.shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_overlap_returns_slices_of_both_tensors():
    piece = Piece(name="x", start=(2, 4, 0), shape=(1, 3, 5), stacked=True)
    assert piece.overlap((0, 0, 0), (2, 9, 5)) is None
    assert piece.overlap((1, 5, 0), (4, 9, 5)) == (
        (slice(1, 3), slice(0, 5)),
        (slice(1, 2), slice(0, 2), slice(0, 5)),
    )
    whole = Piece(name="x", start=(0, 0), shape=(2, 3))
    assert whole.overlap((1, 0), (1, 3)) == ((slice(1, 2), slice(0, 3)), (slice(0, 1), slice(0, 3)))
