"""Adapters in a stock SGLang server, compared with the same adapters merged into its weights."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_server import HEADERS, PROMPT, SAMPLING, Server, serving
from tidemill_testing import tiny_model
from tidemill_testing.sglang_server import API_KEY
from tidemill_weight_update import GroupLink, LoraConfig, WeightUpdater, merge_lora
from tidemill_weight_update.sglang import HttpEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = LoraConfig(r=4, lora_alpha=6, target_modules=MODULES, use_rslora=True)
TOLERANCE = 1e-4
"""For log-probabilities in float32: W x + scale * B (A x) is rounded differently than (W + scale * B A) x."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=3)


@pytest.fixture(scope="module")
def server(checkpoint) -> Iterator[Server]:
    with serving(
        checkpoint,
        python_path=Path(__file__).parents[1] / "helpers" / "without_pinned_memory",
        enable_lora=True,
        lora_backend="torch_native",
        max_lora_rank=8,
        lora_target_modules=list(MODULES),
    ) as started:
        yield started


@pytest.fixture(scope="module")
def base(checkpoint) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def adapter(base: dict[str, torch.Tensor], seed: int) -> list[tuple[str, torch.Tensor]]:
    """Adapter large enough to change the answers from the first tokens on."""
    generator = torch.Generator().manual_seed(seed)
    named = []
    for name, weight in base.items():
        if name.endswith("_proj.weight"):
            outputs, inputs = weight.shape
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            named.append((f"{layer}.lora_A.weight", torch.randn(CONFIG.r, inputs, generator=generator) * 0.1))
            named.append((f"{layer}.lora_B.weight", torch.randn(outputs, CONFIG.r, generator=generator) * 0.1))
    return named


def answer(server: Server, **fields) -> tuple[list[int], torch.Tensor]:
    out = server.generate(return_logprob=True, **fields)
    return out["output_ids"], torch.tensor([logprob for logprob, *_ in out["meta_info"]["output_token_logprobs"]])


def cached(server: Server, **fields) -> int:
    return server.generate(**fields)["meta_info"]["cached_tokens"]


def check_same(got: tuple[list[int], torch.Tensor], wanted: tuple[list[int], torch.Tensor]) -> None:
    assert got[0] == wanted[0]
    torch.testing.assert_close(got[1], wanted[1], rtol=0, atol=TOLERANCE)


@pytest.fixture
def updater(server, base) -> Iterator[WeightUpdater]:
    """Updater of a server with its base weights and no adapters."""
    engine = HttpEngine(server.url, api_key=API_KEY)
    for name in engine.adapters():
        engine.unload_adapter(name)
    made = WeightUpdater([engine])
    made.update(base.items(), "base")
    yield made
    made.close()


def test_adapter_answers_as_the_merged_model_and_can_be_replaced(server, base, updater):
    own = answer(server)
    merged = []
    for seed in (1, 2):
        assert updater.update(merge_lora(base.items(), adapter(base, seed), CONFIG), f"merged {seed}").verified
        merged.append(answer(server))
    updater.update(base.items(), "base")
    assert len({tuple(tokens) for tokens, _ in [own, *merged]}) == 3
    linked = WeightUpdater([HttpEngine(server.url, api_key=API_KEY)], link=GroupLink())
    for through, seed in ((updater, 1), (linked, 2), (updater, 1)):
        through.update_adapter(adapter(base, seed), "policy", CONFIG, seed)
        assert cached(server, lora_path="policy") == 0  # no entry of the previous adapter is found
        assert cached(server, lora_path="policy") > 0
        check_same(answer(server, lora_path="policy"), merged[seed - 1])
        check_same(answer(server), own)  # requests without an adapter
        assert server.generate()["meta_info"]["weight_version"] == str(seed)


def test_new_name_replaces_an_adapter_that_a_request_still_uses(server, base, updater):
    updater.update_adapter(adapter(base, 1), "policy-1", CONFIG, 1)
    long = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"max_new_tokens": 300}, "lora_path": "policy-1"}
    whole = server.generate(**long)["output_ids"]
    with contextlib.closing(server.connect()) as running:
        running.request("POST", "/generate", json.dumps(long | {"stream": True}), HEADERS)
        stream = running.getresponse()
        assert stream.readline().startswith(b"data:")  # the request runs
        updater.update_adapter(adapter(base, 2), "policy-2", CONFIG, 2, replaces="policy-1")
        lines = [line for line in stream.read().splitlines() if line.startswith(b"data: {")]
    last = json.loads(lines[-1].removeprefix(b"data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert whole[-len(last["output_ids"]) :] == last["output_ids"]  # completed with the weights it started with
    assert HttpEngine(server.url, api_key=API_KEY).adapters() == ["policy-2"]
    status, _ = server.request(
        "POST", "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING, "lora_path": "policy-1"}
    )
    assert status == 400


def test_refused_adapter_leaves_the_weights_unchanged(server, base, updater):
    own = answer(server)
    wide = LoraConfig(r=16, lora_alpha=16, target_modules=MODULES)
    matrices = [(name, torch.cat([tensor] * 4, dim=0 if "lora_A" in name else 1)) for name, tensor in adapter(base, 1)]
    with pytest.raises(RuntimeError, match=r"engine 0 of 1 \(HttpEngine.*rank 16 is incompatible"):
        updater.update_adapter(matrices, "policy", wide, 1)
    check_same(answer(server), own)
    assert server.generate()["meta_info"]["weight_version"] == "base"
    updater.update_adapter(adapter(base, 1), "policy", CONFIG, 2)
    assert answer(server, lora_path="policy")[0] != own[0]
