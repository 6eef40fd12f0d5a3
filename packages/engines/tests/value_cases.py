"""Value models in tests: an engine, a loss, training in plain transformers, and a checkpoint with a value head."""

import json
from functools import partial

import torch
from engine_cases import OPTIMIZER, build_engine, checkpoint_weights, shard, weights_of
from safetensors.torch import load_file, save_file
from tidemill_dataproto import ragged

value_engine = partial(build_engine, model_type="value_model")


def value_loss(output, micro_batch, normalizer):
    mask = ragged.values(micro_batch["response_mask"]).to(output.values.dtype)
    error = (output.values - ragged.values(micro_batch["advantages"])).square()
    return (error * mask).sum() / normalizer.num_tokens, {"value": (output.values * mask).sum() / normalizer.num_tokens}


def plain_value_training(path, batches):
    """Values of the last batch before training, then metrics and weights, from plain transformers, row by row."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    load = transformers.AutoModelForTokenClassification.from_pretrained
    model = load(path, dtype=torch.float32, attn_implementation="eager").eval()
    settings = {name: value for name, value in OPTIMIZER.items() if name != "clip_grad"}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **settings)

    def values_of(batch):
        rows = zip(batch["input_ids"].unbind(), batch["responses"].unbind(), strict=True)
        return [model(input_ids=ids[None]).logits[0, len(ids) - len(r) - 1 : -1, 0][: len(r)] for ids, r in rows]

    with torch.no_grad():
        before = torch.cat(values_of(batches[-1]))
    history = []
    for batch in batches:
        mask = ragged.values(batch["response_mask"]).float()
        values = torch.cat(values_of(batch))
        loss = ((values - ragged.values(batch["advantages"])).square() * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        mean = (values * mask).sum() / mask.sum()
        history.append({"loss": loss.item(), "grad_norm": norm.item(), "value": mean.item()})
    return before, history, checkpoint_weights(model)


def with_value_head(source, target):
    """The checkpoint as one of a model for token classification, with a random head."""
    import shutil

    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(0)
    tensors |= {"score.weight": torch.randn(1, 64, generator=generator), "score.bias": torch.tensor([0.3])}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
    (target / "config.json").write_text(json.dumps(config))
    return target


def run_values(path, batches, layouts):
    out = []
    for layout in layouts:
        engine = value_engine(path, **layout)
        rows = [shard(engine, batch) for batch in batches]
        values = engine.infer_batch(rows[-1])
        assert list(values.batch.keys()) == ["values"]
        history = [engine.train_batch(batch, value_loss) for batch in rows]
        out.append((engine.get_data_parallel_rank(), ragged.values(values["values"]), history, weights_of(engine)))
        engine.close()
    return out
