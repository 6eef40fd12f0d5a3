"""The same global batch gives the same step as a plain loop, however the engine is laid out and the batch is split.

A layout is a combination of factors, such as world size or micro-batch size; `layouts.SUITES` lists those of each
backend. The default layouts cover each pair of values of two factors at least once; `slow` runs all combinations.
"""

from collections import defaultdict
from itertools import product

import pytest
import torch
from engine_cases import (
    OPTIMIZER,
    VOCAB,
    build_engine,
    check_training,
    engine_training,
    make_batch,
    pad_batch,
    plain_log_probs,
    plain_model,
    plain_training,
    policy_like_loss,
    shard,
    starcoder2_model,
    trained_on,
    weights_of,
)
from layouts import LORA, SUITES
from tidemill_dataproto import ragged
from tidemill_engines import OptimizerConfig
from tidemill_testing import run_ranks, tiny_model


def make_batches():
    return [make_batch(13, seed=1, temperature=0.8), make_batch(1, seed=3)]


def row_order(num_rows, layout):
    """Order of the rows in the global batch."""
    if layout["rows"] == "mixed":
        return torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    return torch.arange(num_rows)


def laid_out(batch, layout):
    batch = batch.reorder(row_order(len(batch), layout))
    return pad_batch(batch) if layout["form"] == "padded" else batch


def run_layouts(backend, paths, batches, layouts):
    out = []
    for layout in layouts:
        rows = [laid_out(batch, layout) for batch in batches]
        engine = build_engine(paths[layout["family"]], backend=backend, **SUITES[backend].settings(layout))
        inferred = run_inference(engine, shard(engine, rows[0]))
        out.append((inferred, trained_on(engine, rows)))
        engine.close()
        engine.close()
    return out


def run_inference(engine, rows):
    """Return the rows of this rank, whether its outputs are collected, and their flat columns."""
    out = engine.infer_batch(rows, entropy=True)
    columns = [out[name] for name in ("log_probs", "entropy")]
    if not ragged.is_ragged(rows["responses"]):
        mask = rows["attention_mask"][:, -rows["responses"].shape[1] :].bool()
        columns = [ragged.from_padded(column, mask) for column in columns]
    return engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs(), [ragged.values(c) for c in columns]


def check_inference(of_ranks, rows, layout):
    """Check the ranks' outputs against a plain forward of each row, and that one rank per part is collected."""
    parts = {part: columns for part, is_source, columns in of_ranks if is_source}
    assert sorted(part for part, is_source, _ in of_ranks if is_source) == list(range(len(parts)))
    assert {part for part, _, _ in of_ranks} == parts.keys()
    for part, _, columns in of_ranks:
        assert all(torch.equal(*pair) for pair in zip(columns, parts[part], strict=True)), layout
    rows = [rows[row] for row in row_order(len(rows), layout)]
    for number, expected in enumerate(zip(*rows, strict=True)):
        actual = torch.cat([parts[part][number] for part in range(len(parts))])
        torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-5, atol=1e-5, msg=lambda m: f"{layout}: {m}")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Per backend: paths of the models by family, results of plain training by family and tuning, and the plain
    log-probabilities of the first batch by family, before training."""
    return {backend: make_models(suite, tmp_path_factory.mktemp(backend)) for backend, suite in SUITES.items()}


def make_models(suite, folder):
    paths, expected, rows = {}, {}, {}
    for family in suite.factors["family"]:
        name, *tied = family.split()
        fields = {} if "moe" in name else {"tie_word_embeddings": bool(tied)}
        paths[family] = tiny_model(folder / family, name, vocab_size=VOCAB, **fields, **suite.overrides)
    if "LoRA" in suite.factors["tuning"]:
        run_ranks(run_save_adapters, 1, list(paths.values()))
    for family, tuning in product(paths, suite.factors["tuning"]):
        adapter = adapter_of(paths[family]) if tuning == "LoRA" else None
        expected[family, tuning] = plain_training(paths[family], make_batches(), adapter=adapter)
    with torch.no_grad():
        for family, path in paths.items():  # new adapters do not change outputs
            rows[family] = plain_log_probs(plain_model(path), make_batches()[0])
    return paths, expected, rows


def adapter_of(path):
    return path / "adapter"


def run_save_adapters(paths):
    """Return the initial adapters of every engine."""
    for path in paths:
        engine = build_engine(path, model={"lora": LORA})
        engine.save_adapter(adapter_of(path))
        engine.close()


def check_layouts(backend, models, layouts):
    paths, expected, rows = models[backend]
    by_world_size = defaultdict(list)
    for layout in layouts:
        by_world_size[SUITES[backend].world_size(layout)].append(layout)
    for world_size, group in by_world_size.items():
        results = run_ranks(run_layouts, world_size, backend, paths, make_batches(), group, timeout_s=1200.0)
        for number, layout in enumerate(group):
            inferred, trained = zip(*(of_rank[number] for of_rank in results), strict=True)
            check_inference(inferred, rows[layout["family"]], layout)
            check_training(trained, expected[layout["family"], layout["tuning"]], layout)


@pytest.mark.parametrize("backend", sorted(SUITES))
def test_step_does_not_depend_on_layout(models, backend):
    layouts = SUITES[backend].pairwise_layouts()
    assert len(layouts) < 30
    check_layouts(backend, models, layouts)


GRID = [
    (backend, dict(zip(suite.grid, values, strict=True)) | suite.fixed)
    for backend, suite in SUITES.items()
    for values in product(*(suite.factors[name] for name in suite.grid))
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("backend", "wanted"), GRID, ids=lambda value: str(value))
def test_step_does_not_depend_on_layout_all_suites(models, backend, wanted):
    layouts = SUITES[backend].all_layouts()
    check_layouts(backend, models, [layout for layout in layouts if wanted.items() <= layout.items()])


EXEMPTING = OPTIMIZER | {"decay_norms_and_biases": False}
FIVE_STEPS = [make_batch(9, seed=seed, temperature=0.8) for seed in range(5)]
WHOLE_EXPERTS = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
ENGINES = {
    "qwen3": [
        ("fsdp2", {}),
        ("megatron", {"tensor_model_parallel_size": 2}),
        ("megatron", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
        ("megatron", {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}),
    ],
    "qwen3_moe": [
        ("fsdp2", {"model": {"router_aux_loss_coef": 0.3}}),
        ("megatron", {"model": {"router_aux_loss_coef": 0.3}, "expert_model_parallel_size": 2}),
        ("megatron", {"model": {"router_aux_loss_coef": 0.3}, "pipeline_model_parallel_size": 2}),
        ("megatron", {"model": {"router_aux_loss_coef": 0.3}, **WHOLE_EXPERTS}),
    ],
}


def run_engines(paths):
    return {
        family: [
            engine_training(paths[family], FIVE_STEPS, backend=backend, optimizer=EXEMPTING, **settings)
            for backend, settings in engines
        ]
        for family, engines in ENGINES.items()
    }


def test_engines_agree_over_five_steps(models):
    paths, _, _ = models["megatron"]
    ranks = run_ranks(run_engines, 2, {family: paths[family] for family in ENGINES}, timeout_s=250)
    for family, engines in ENGINES.items():
        reference = ranks[0][family][0]
        assert len(reference[0]) == 5
        for number, (backend, settings) in enumerate(engines):
            check_training([rank[family][number] for rank in ranks], reference, (family, backend, settings))


EXACT = [  # float64, for the family with float64 layers and sliding windows of 4 tokens
    {},
    {"max_token_len_per_gpu": 30},
    {"ulysses_sequence_parallel_size": 2, "reshard_after_forward": False, "max_token_len_per_gpu": 30},
    {"micro_batch_size_per_gpu": 1, "fsdp_size": 1},
]


def run_exact(path, batches):
    out = []
    for settings in EXACT:
        engine = {"param_dtype": "float64", "reduce_dtype": "float64", **settings}
        out.append(engine_training(path, batches, model={"dtype": "float64"}, **engine))
    return out


def test_sliding_windows_and_double_precision(tmp_path):
    path = starcoder2_model(tmp_path / "model")
    batches = [batch_in_double(batch) for batch in make_batches()]
    expected = plain_training(path, batches, dtype=torch.float64)
    results = run_ranks(run_exact, 2, path, batches)
    for number, case in enumerate(EXACT):
        check_training([of_rank[number] for of_rank in results], expected, case, tolerance=1e-9)


def batch_in_double(batch):
    out = batch.clone()
    out.batch["advantages"] = batch["advantages"].double()
    return out


def run_other_attention(path, batches):
    return engine_training(path, batches, model={"attn_implementation": "sdpa"}, max_token_len_per_gpu=30)


def test_sdpa_attention_of_transformers(models):
    paths, expected, _ = models["fsdp2"]
    results = run_ranks(run_other_attention, 1, paths["qwen3 tied"], make_batches())
    check_training(results, expected["qwen3 tied", "full"], "sdpa")


SCHEDULE = {"lr": 0.008, "lr_scheduler": "linear", "lr_warmup_steps": 2, "total_steps": 4}


def run_schedule(path, batches):
    return engine_training(path, batches, optimizer=OPTIMIZER | SCHEDULE)


def run_reset(path, batches):
    """Train with other settings, then reset optimizer and schedule."""
    engine = build_engine(path, optimizer={"lr": 0.1, "lr_warmup_steps": 3})
    engine.train_batch(shard(engine, batches[0]), policy_like_loss, calculate_entropy=True)
    engine.save_hf(path.parent / "between")
    engine.reset_optimizer(OptimizerConfig(**(OPTIMIZER | SCHEDULE)))
    history = [engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True) for batch in batches]
    weights = weights_of(engine)
    engine.close()
    frozen = build_engine(path, optimizer=False)
    with pytest.raises(ValueError, match="created without an optimizer; create it with an OptimizerConfig to train"):
        frozen.reset_optimizer(OptimizerConfig())
    frozen.close()
    return history, weights


def test_schedule_changes_weights_and_reset_optimizer_restarts(tmp_path):
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    batches = [*make_batches(), make_batch(6, seed=2), make_batch(5, seed=6)]
    rates = [0.004, 0.008, 0.008, 0.004]
    straight = run_ranks(run_schedule, 2, path, batches)
    check_training(straight, plain_training(path, batches, rates), "schedule")
    assert [metrics["lr"] for metrics in straight[0][0]] == rates
    after_reset = run_ranks(run_reset, 2, path, batches)
    check_training(after_reset, plain_training(tmp_path / "between", batches, rates), "reset")


def run_masked(path, batch):
    mask = batch["response_mask"]
    nothing = batch.select(["input_ids", "responses", "advantages"])
    nothing.batch["response_mask"] = torch.zeros_like(mask)
    out = []
    for batches in ([nothing], [batch[0:0]], [batch[0:1]]):  # all masked; no rows at all; rank 1 has no row
        out.append(engine_training(path, batches, optimizer={"lr": 1e-2, "weight_decay": 0.0}))
    return out, engine_training(path, [])[1]


def test_masked_and_empty_batches_have_zero_gradient(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(5, seed=5)
    zeros = ("loss", "pg", "nll", "entropy", "log_prob", "entropy_max", "grad_norm", "grad_nonfinite")
    for (masked, empty, one), before in run_ranks(run_masked, 2, path, batch):
        for (metrics,), weights in (masked, empty):
            assert metrics == dict.fromkeys(zeros, 0) | {"lr": 1e-2}
            assert all(torch.equal(weights[name], before[name]) for name in before)
        assert one[0][0]["grad_norm"] > 0
        assert not torch.equal(one[1]["model.norm.weight"], before["model.norm.weight"])
