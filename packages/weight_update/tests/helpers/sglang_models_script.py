"""Run by sglang/test_models.py: check recorded plans of SGLang's own model classes; prints JSON on the last line.

Importing SGLang takes most of the time, so one process checks all models, and ranks are forked from it.
"""

import json
import math
import os
import sys
import tempfile
import traceback
from multiprocessing import get_context as start_method
from pathlib import Path
from types import SimpleNamespace

os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"  # uses shared memory that remains after a rank is killed

import torch
import transformers
from forked_engine import send_or_serve
from safetensors.torch import load_file
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_context
from tidemill_weight_update.plan.record import record
from tidemill_weight_update.sglang.loader import finish_load
from tidemill_weight_update.tensors import SourceSpec

# 130 tokens: the embedding is padded with one rank and with two.
SIZES = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_parameters": YARN,
}
DEEPSEEK_671B = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_parameters": YARN,
}
CASES = {
    "qwen2": (Qwen2ForCausalLM, "Qwen2", {}),
    "qwen2 tied": (Qwen2ForCausalLM, "Qwen2", {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, "Qwen3", {"head_dim": 32}),
    "qwen3 tied": (Qwen3ForCausalLM, "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama": (LlamaForCausalLM, "Llama", {"attention_bias": True}),
    "llama tied": (LlamaForCausalLM, "Llama", {"tie_word_embeddings": True}),
    "llama one kv head": (LlamaForCausalLM, "Llama", {"num_key_value_heads": 1}),
    "qwen3 from float32": (Qwen3ForCausalLM, "Qwen3", {"dtype": "float32"}),
    "qwen3 moe": (Qwen3MoeForCausalLM, "Qwen3Moe", EXPERTS),
    "qwen3 moe tied": (Qwen3MoeForCausalLM, "Qwen3Moe", EXPERTS | {"tie_word_embeddings": True}),
    "qwen3 moe tied as state_dict": (Qwen3MoeForCausalLM, "Qwen3Moe", EXPERTS | {"tie_word_embeddings": True}),
    "qwen2 tied as state_dict": (Qwen2ForCausalLM, "Qwen2", {"tie_word_embeddings": True}),
    "deepseek v3": (DeepseekV3ForCausalLM, "DeepseekV3", DEEPSEEK),
}


def make_config(case):
    _, family, fields = CASES[case]
    return config_of(family, SIZES | fields)


def config_of(family, fields):
    config = getattr(transformers, f"{family}Config")(**fields)
    config.architectures = [f"{family}ForCausalLM"]
    if family == "DeepseekV3":  # fields of the published config.json that transformers does not keep
        config.moe_layer_freq, config.topk_method, config.scoring_func = 1, "noaux_tc", "sigmoid"
    return config


def write_checkpoint(case, folder):
    """Write a checkpoint with transformers; return its tensors."""
    config = make_config(case)
    dtype = getattr(torch, CASES[case][2].get("dtype", "bfloat16"))
    model = getattr(transformers, f"{CASES[case][1]}ForCausalLM")(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if case.endswith("as state_dict"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def build(case):
    with torch.random.fork_rng():
        return CASES[case][0](make_config(case))


def scramble(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).clone()


def parameter_bits(model):
    return {name: bits(parameter) for name, parameter in model.named_parameters()}


def derived_bits(model):
    """Tensor attributes of modules that are neither parameters nor buffers."""
    return {
        f"{path}.{name}": bits(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def different(a, b):
    return sorted(
        name for name in a.keys() | b.keys() if not (name in a and name in b and torch.equal(a[name], b[name]))
    )


def place(parameter, offset, shape, strides):
    return parameter.data.as_strided(shape, strides, parameter.data.storage_offset() + offset)


def wrong_counts(model, plan):
    """Names of parameters with elements that the plan does not write exactly once."""
    counts = {name: torch.zeros_like(parameter, dtype=torch.int32) for name, parameter in model.named_parameters()}
    for copy in plan.copies:
        place(counts[copy.parameter], copy.offset, copy.box.shape, copy.strides).add_(1)
    for fill in plan.fills:
        place(counts[fill.parameter], fill.offset, fill.shape, fill.strides).add_(1)
    return sorted(name for name, count in counts.items() if not (count == 1).all())


def check_plan(case, tensors):
    """Record the plan of a model; return its summary, and what recording changed."""
    model = build(case)
    scramble(model, seed=2)
    finish_load(model)
    before = parameter_bits(model) | derived_bits(model)
    specs = [SourceSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with torch.inference_mode():  # as SGLang's schedulers do
        plan = record(model, specs)
    after = parameter_bits(model) | derived_bits(model)
    with torch.device("meta"):
        on_meta = record(build(case), specs)
    return summary(plan, specs) | {
        "changed_by_recording": different(before, after),
        "wrong_counts": wrong_counts(model, plan),
        "same_plan_on_meta": on_meta == plan,
    }


def update(case, tensors, rank, pipes):
    """Load `tensors` into one model as SGLang does and into another with a `WeightUpdater`; return the differences."""
    reference, model = build(case), build(case)
    scramble(reference, seed=1)
    scramble(model, seed=2)
    reference.load_weights(iter(tensors.items()))
    finish_load(model)
    with torch.inference_mode():
        refused = send_or_serve(model, tensors, rank, pipes)
    return {
        "refused": refused,
        "differs_from_stock": different(parameter_bits(model), parameter_bits(reference)),
        "derived_differs": different(derived_bits(model), derived_bits(reference)),
        "derived": sorted({name.split(".")[-1] for name in derived_bits(reference)}),
    }


def summary(plan, specs):
    return {
        "copies": len(plan.copies),
        "through_loader": plan.through_loader,
        "unused": sorted({spec.name for spec in specs} - {copy.name for copy in plan.copies} - {*plan.through_loader}),
        "uncovered": plan.uncovered,
    }


def deepseek_shapes(config):
    """Name -> shape of each tensor of a DeepSeek-V3 checkpoint."""
    c, hidden, heads = config, config.hidden_size, config.num_attention_heads
    head = c.qk_nope_head_dim + c.qk_rope_head_dim
    shapes = {f"{name}.weight": (c.vocab_size, hidden) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = (hidden,)

    def mlp(path, size):
        for name in ("gate_proj", "up_proj"):
            shapes[f"{path}.{name}.weight"] = (size, hidden)
        shapes[f"{path}.down_proj.weight"] = (hidden, size)

    for index in range(c.num_hidden_layers):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {
            f"{layer}.self_attn.{name}.weight": shape
            for name, shape in {
                "q_a_proj": (c.q_lora_rank, hidden),
                "q_a_layernorm": (c.q_lora_rank,),
                "q_b_proj": (heads * head, c.q_lora_rank),
                "kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, hidden),
                "kv_a_layernorm": (c.kv_lora_rank,),
                "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
                "o_proj": (hidden, heads * c.v_head_dim),
            }.items()
        }
        if index < c.first_k_dense_replace:
            mlp(f"{layer}.mlp", c.intermediate_size)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (c.n_routed_experts, hidden)
        shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (c.n_routed_experts,)
        mlp(f"{layer}.mlp.shared_experts", c.moe_intermediate_size * c.n_shared_experts)
        for expert in range(c.n_routed_experts):
            mlp(f"{layer}.mlp.experts.{expert}", c.moe_intermediate_size)
    return shapes


def check_671b(tensors):
    """Record the published DeepSeek-V3 on the meta device; `tensors` of the tiny model are used to check the names."""
    tiny = deepseek_shapes(make_config("deepseek v3"))
    config = config_of("DeepseekV3", DEEPSEEK_671B)
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    specs = [SourceSpec(name, shape, torch.bfloat16) for name, shape in deepseek_shapes(config).items()]
    plan = record(model, specs)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for part in plan.copies:
        sizes[part.parameter] -= part.box.numel
    for fill in plan.fills:
        sizes[fill.parameter] -= math.prod(fill.shape)
    return summary(plan, specs) | {
        "names_as_in_a_checkpoint": tiny == {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        "sources": len(specs),
        "not_written": sorted(name for name, size in sizes.items() if size),
    }


def rank_main(rank, tp_size, store, checkpoints, full_size, results, pipes):
    try:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.bfloat16)
        current_platform.init_backend()
        args = get_context().override_server_args(device="cpu", tp_size=tp_size).install()
        init_distributed_environment(
            backend="gloo", world_size=tp_size, rank=rank, local_rank=rank, distributed_init_method=f"file://{store}"
        )
        initialize_model_parallel(tensor_model_parallel_size=tp_size)
        shape = SimpleNamespace(hf_config=SimpleNamespace(), hidden_size=64, dtype=torch.bfloat16)
        initialize_dp_attention(args, shape)
        found: dict = {}
        for case, tensors in ({} if full_size else checkpoints).items():
            found[case] = check_plan(case, tensors)
            found[case]["updated"] = update(case, tensors, rank, pipes)
        if full_size:
            found = {"deepseek v3 671b": check_671b(checkpoints["deepseek v3"])}
        results.put((rank, found))
    except Exception:
        results.put((rank, traceback.format_exc()))
        raise


def main(full_size):
    torch.set_num_threads(1)  # threads do not survive the fork
    found = {}
    with tempfile.TemporaryDirectory(prefix="tidemill-record-") as folder:
        checkpoints = {case: write_checkpoint(case, Path(folder) / case) for case in CASES}
        for tp_size in (1, 2):
            context = start_method("fork")
            results = context.Queue()
            store = Path(folder) / f"store{tp_size}"
            pipes = [context.Pipe() for _ in range(tp_size - 1)]
            ends = [[ours for ours, _ in pipes], *([theirs] for _, theirs in pipes)]
            ranks = [
                context.Process(
                    target=rank_main, args=(rank, tp_size, store, checkpoints, full_size, results, own), daemon=True
                )
                for rank, own in enumerate(ends)
            ]
            for process in ranks:
                process.start()
            values = {}
            while len(values) < tp_size:
                rank, values[rank] = results.get(timeout=400)
                if isinstance(values[rank], str):  # the other ranks would wait for it
                    raise RuntimeError(f"rank {rank} of {tp_size}: {values[rank]}")
            found[tp_size] = [values[rank] for rank in range(tp_size)]
            for process in ranks:
                process.join(timeout=20)
                process.kill()
    print(json.dumps(found))


if __name__ == "__main__":
    main(full_size="--full-size" in sys.argv)
