"""Train a model with FSDP2 and update a running SGLang server after each step, with this package alone.

    python -m sglang.launch_server --model-path MODEL --port 30000 --api-key KEY \
        --custom-weight-loader tidemill_weight_update.sglang.loader.load &
    torchrun --nproc-per-node 2 fsdp2_torchrun.py MODEL http://127.0.0.1:30000 KEY
"""

import os
import sys

import torch
import torch.distributed as dist
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.sglang import HttpEngine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


def main(path: str, url: str, api_key: str) -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(mesh.device_type)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    engines = [HttpEngine(url, api_key)] if dist.get_rank() == 0 else []
    updater = WeightUpdater(engines)  # dtype=torch.bfloat16 halves the bytes for a bfloat16 engine
    for step in range(1, 4):
        tokens = torch.randint(model.config.vocab_size, (4, 32), device=mesh.device_type)  # replace by your data
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = updater.update(list(model.named_parameters()), weight_version=step)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, update {stats.seconds:.3f} s, verified: {stats.verified}")
    updater.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
