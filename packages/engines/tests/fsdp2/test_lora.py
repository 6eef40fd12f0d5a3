"""Low-rank adapters against peft: frozen base, separate and merged export."""

import json

import pytest
import torch
import transformers
from engine_cases import (
    OPTIMIZER,
    VOCAB,
    build_engine,
    full,
    make_batch,
    plain_log_probs,
    plain_model,
    plain_policy_like_loss,
    policy_like_loss,
    relative_error,
    shard,
    weights_of,
)
from safetensors.torch import load_file
from tidemill_engines.config import LoraConfig
from tidemill_testing import run_ranks, tiny_model

peft = pytest.importorskip("peft")
SMALL = LoraConfig(rank=3, alpha=8.0, target_modules=("q_proj", "down_proj"))  # 3 rows of A on 2 ranks


def adapter_state(engine):
    return {name: full(weight).clone() for name, weight in engine.get_adapter_param()}


def run_lora(path, batches, folder, cases):
    out = []
    for number, (lora, layout) in enumerate(cases):
        engine = build_engine(path, model={"lora": lora}, **layout)
        before, start = weights_of(engine), adapter_state(engine)
        if number == 0:
            engine.save_adapter(folder / "start")
        rows = [shard(engine, batch) for batch in batches]
        history = [engine.train_batch(batch, policy_like_loss, calculate_entropy=True) for batch in rows]
        trained = {name for name, param in engine.model.named_parameters() if param.requires_grad}
        engine.save_adapter(folder / f"adapter_{number}")
        engine.save_hf(folder / f"merged_{number}")
        engine.save_checkpoint(folder / f"checkpoint_{number}")
        state, weights, log_probs = adapter_state(engine), weights_of(engine), engine.infer_batch(rows[0])
        engine.close()
        again = build_engine(path, model={"lora": lora}, **layout)
        again.load_checkpoint(folder / f"checkpoint_{number}")
        same = torch.equal(again.infer_batch(rows[0])["log_probs"].values(), log_probs["log_probs"].values())
        again.close()
        out.append((before, start, history, trained, state, weights, same))
    return out


def plain_lora_training(path, adapter, batches):
    """Train the saved adapter with peft on plain transformers."""
    model = peft.PeftModel.from_pretrained(plain_model(path), adapter, is_trainable=True).train()
    settings = {name: value for name, value in OPTIMIZER.items() if name != "clip_grad"}
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, foreach=False, **settings)
    history = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = plain_policy_like_loss(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, OPTIMIZER["clip_grad"])
        optimizer.step()
        history.append({"loss": loss.item(), "grad_norm": norm.item()})
    state = peft.get_peft_model_state_dict(model)
    return history, {name: weight.detach() for name, weight in state.items()}, model.merge_and_unload()


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False)])
def test_training_adapters_equals_peft(tmp_path, family, tied):
    path = tiny_model(tmp_path / "model", family, vocab_size=VOCAB, tie_word_embeddings=tied)
    original = load_file(path / "model.safetensors")
    batches = [make_batch(9, seed=1), make_batch(6, seed=2), make_batch(7, seed=3)]
    cases = [
        (SMALL, {"max_token_len_per_gpu": 40}),
        (SMALL, {"micro_batch_size_per_gpu": 1, "reshard_after_forward": False, "param_offload": True}),
        (SMALL, {"fsdp_size": 1}),
    ]
    results = run_ranks(run_lora, 2, path, batches, tmp_path, cases)
    history, state, merged = plain_lora_training(path, tmp_path / "start", batches)
    assert len(state) == 8
    for of_rank in results:
        for before, start, actual_history, trained, actual_state, weights, same in of_rank:
            assert same
            assert sorted(before) == sorted(weights) == sorted(original)
            assert all(torch.equal(before[name], tensor) for name, tensor in original.items())  # B starts at zero
            assert sorted(start) == sorted(actual_state) == sorted(state)
            assert len(trained) == 8
            assert all("lora_" in name for name in trained)
            for actual, expected in zip(actual_history, history, strict=True):
                assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
            for name, weight in state.items():
                assert relative_error(actual_state[name], weight) < 1e-4, name
            for name, weight in merged.named_parameters():
                assert relative_error(weights[name], weight.detach()) < 1e-5, name
                adapted = "q_proj" in name or "down_proj" in name
                assert torch.equal(weights[name], original[name]) is not adapted
    check_exports(tmp_path, path, results[0][0][5], batches[0])


def check_exports(folder, path, weights, batch):
    written = load_file(folder / "merged_0" / "model.safetensors")
    assert sorted(written) == sorted(weights)
    assert all(torch.equal(written[name], weight) for name, weight in weights.items())
    config = json.loads((folder / "adapter_0" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], sorted(config["target_modules"])) == ("LORA", 3, ["down_proj", "q_proj"])
    ids = batch["input_ids"].unbind()[0][None]
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(plain_model(path), folder / "adapter_0").eval()(input_ids=ids).logits
        whole = plain_model(folder / "merged_0").eval()(input_ids=ids).logits
    torch.testing.assert_close(adapted, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", [("all-linear",), ["all-linear"]], ids=str)
def test_all_linear_leaves_out_fused_experts(tmp_path, monkeypatch, targets):
    monkeypatch.delenv("RANK", raising=False)
    path = tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB)
    batch = make_batch(6, seed=1)
    engine = build_engine(path, model={"lora": LoraConfig(rank=2, alpha=8.0, target_modules=targets)})
    adapted = {name.split(".")[-4] for name, _ in engine.get_adapter_param() if ".layers.1." in name}
    engine.train_batch(batch, policy_like_loss, calculate_entropy=True)
    log_probs = engine.infer_batch(batch)["log_probs"].unbind()
    engine.save_adapter(tmp_path / "adapter")
    engine.close()
    assert adapted == {"self_attn"}
    model = peft.PeftModel.from_pretrained(plain_model(path), tmp_path / "adapter").eval()
    with torch.no_grad():
        for actual, (expected, _) in zip(log_probs, plain_log_probs(model, batch), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_transposed_layers_of_gpt2_are_refused(tmp_path):
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, n_positions=32, vocab_size=VOCAB)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    lora = LoraConfig(rank=2, target_modules=("attn.c_proj",))
    [error] = run_ranks(build_error, 1, tmp_path, {"lora": lora, "attn_implementation": "eager"})
    assert "LoraConfig.target_modules must be linear layers; transformer.h.0.attn.c_proj are not" in error


def build_error(path, model):
    try:
        build_engine(path, model=model)
    except ValueError as error:
        return str(error)
    return "none"


def run_all_linear(path, folder, batch):
    lora = LoraConfig(rank=2, dropout=0.1)
    engine = build_engine(path, model={"lora": lora, "gradient_checkpointing": True}, max_token_len_per_gpu=40)
    rows = shard(engine, batch)
    metrics = engine.train_batch(rows, policy_like_loss, calculate_entropy=True)
    engine.save_adapter(folder / "adapter")
    names = list(adapter_state(engine))
    engine.close()
    for target, error in (
        (("nothing",), "nothing"),
        (("embed_tokens",), "must be linear layers; model.embed_tokens"),
        (("q_proj", "lm_head"), "must not include the head of the model"),
    ):
        with pytest.raises(ValueError, match=error):
            build_engine(path, model={"lora": LoraConfig(target_modules=target)})
    whole = build_engine(path)
    with pytest.raises(ValueError, match=r"trains no adapter; set ModelConfig.lora"):
        whole.save_adapter(folder / "none")
    with pytest.raises(ValueError, match=r"trains no adapter; set ModelConfig.lora"), whole.disable_adapter():
        pass
    assert list(whole.get_adapter_param()) == []
    whole.close()
    return names, metrics["grad_norm"]


def test_all_linear_excludes_head(tmp_path):
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    for names, norm in run_ranks(run_all_linear, 2, path, tmp_path, make_batch(8, seed=5)):
        assert len(names) == 2 * 2 * 7
        assert not any("lm_head" in name for name in names)
        assert norm > 0
    model = peft.PeftModel.from_pretrained(plain_model(path), tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(model)
    assert sorted(loaded) == sorted(saved)
    assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())


def run_without_adapter(path, batches, cases):
    """Return, for each case, log-probabilities of the base, those without adapter, and two equal runs of training."""
    out = []
    for settings, layout in cases:
        base = build_engine(path, optimizer=False, model=settings, **layout)
        rows = [shard(base, batch) for batch in batches]
        expected = [base.infer_batch(batch)["log_probs"].values() for batch in rows]
        base.close()
        actual, runs = [], []
        for uses_base in (False, True):
            engine = build_engine(path, model={"lora": LoraConfig(rank=2, dropout=0.1), **settings}, **layout)
            torch.manual_seed(1)
            history = []
            for batch in rows:
                history.append(engine.train_batch(batch, policy_like_loss, calculate_entropy=True))
                if uses_base:
                    with engine.disable_adapter():
                        with engine.disable_adapter():
                            pass
                        trained = {name for name, param in engine.model.named_parameters() if param.requires_grad}
                        assert all("lora_" in name for name in trained)
                        assert len(trained) == 2 * 2 * 7
                        actual.append(engine.infer_batch(batch)["log_probs"].values())
                        with pytest.raises(RuntimeError, match=r"within disable_adapter\(\); leave the context first"):
                            engine.train_batch(batch, policy_like_loss, calculate_entropy=True)
            runs.append((history, engine.infer_batch(rows[0])["log_probs"].values(), adapter_state(engine)))
            engine.close()
        out.append((expected, actual, runs))
    return out


def test_disable_adapter_infers_with_base_and_keeps_training_bitwise(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batches = [make_batch(6, seed=seed) for seed in (1, 2, 3)]
    cases = [({"gradient_checkpointing": True}, {"param_offload": True}), ({}, {"reshard_after_forward": False})]
    for of_rank in run_ranks(run_without_adapter, 2, path, batches, cases):
        for expected, actual, (plain, with_base) in of_rank:
            assert all(torch.equal(log_probs, of_base) for log_probs, of_base in zip(actual, expected, strict=True))
            assert plain[0] == with_base[0]
            assert torch.equal(plain[1], with_base[1])
            assert not torch.equal(plain[1], expected[0])
            assert all(torch.equal(with_base[2][name], weight) for name, weight in plain[2].items())


def test_checkpoint_with_another_scale_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    path, folder = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB), tmp_path / "checkpoint"
    engine = build_engine(path, model={"lora": LoraConfig(rank=2, alpha=8.0)})
    engine.save_checkpoint(folder)
    engine.close()
    other_rank = build_engine(path, model={"lora": LoraConfig(rank=3, alpha=8.0)})
    with pytest.raises(ValueError, match="could not load the checkpoint"):
        other_rank.load_checkpoint(folder)
    other_rank.close()
    other_alpha = build_engine(path, model={"lora": LoraConfig(rank=2, alpha=16.0)})
    with pytest.raises(ValueError, match=r"trained with LoraConfig.alpha=8.0, and this engine has 16.0"):
        other_alpha.load_checkpoint(folder)
    manifest = json.loads((folder / "engine.json").read_text())
    del manifest["progress"]["lora_alpha"]  # as in a checkpoint of an earlier version
    (folder / "engine.json").write_text(json.dumps(manifest))
    other_alpha.load_checkpoint(folder)
    other_alpha.close()


def value_loss(output, micro_batch, normalizer):
    return (output.values - 1).square().sum() / normalizer.num_tokens, {}


def run_value_model(path, folder, batch):
    engine = build_engine(path, model_type="value_model", model={"lora": LoraConfig(rank=2)}, optimizer={"lr": 1e-2})
    before = weights_of(engine)
    rows = shard(engine, batch)
    losses = [engine.train_batch(rows, value_loss)["loss"] for _ in range(4)]
    changed = {name for name, weight in weights_of(engine).items() if not torch.equal(weight, before[name])}
    with pytest.raises(ValueError, match=r"an adapter does not contain score.weight, score.bias"):
        engine.save_adapter(folder / "adapter")
    engine.close()
    return losses, changed


def test_new_value_head_is_trained_with_adapters(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for losses, changed in run_ranks(run_value_model, 2, path, tmp_path, make_batch(6, seed=6)):
        assert losses[-1] < losses[0]
        assert {"score.weight", "score.bias", "model.layers.0.self_attn.q_proj.weight"} < changed
        assert len(changed) == 2 + 2 * 7
