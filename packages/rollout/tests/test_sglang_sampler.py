"""The sampling backend "tidemill" in stock SGLang: on a GPU its kernel, on a CPU SGLang's own way."""

import subprocess
import sys
from pathlib import Path

import pytest
from tidemill_testing import tiny_model

SCRIPT = """
import sys
import sglang
import torch

PROMPT, NUM = [3, 4, 5], 200

def main():
    on_gpu = torch.cuda.is_available()
    own = dict(device="cuda", attention_backend="triton", mem_fraction_static=0.1) if on_gpu else dict(device="cpu")
    engine = sglang.Engine(
        model_path=sys.argv[1], skip_tokenizer_init=True, sampling_backend="tidemill", log_level="warning",
        dtype="float32", max_total_tokens=8192, **own,
    )
    def sample(**params):
        return engine.generate(
            input_ids=[PROMPT] * NUM, return_logprob=True,
            sampling_params={"max_new_tokens": 6, "ignore_eos": True, **params},
        )
    outputs = sample(temperature=1.0)
    found = [[(item[1], item[0]) for item in each["meta_info"]["output_token_logprobs"]] for each in outputs]
    assert len({tuple(token for token, _ in each) for each in found}) > NUM // 2  # they differ
    scored = engine.generate(
        input_ids=[PROMPT + [token for token, _ in each] for each in found], return_logprob=True, logprob_start_len=0,
        sampling_params={"max_new_tokens": 1, "temperature": 1.0},
    )
    for each, score in zip(found, scored, strict=True):
        for (_, log_prob), item in zip(each, score["meta_info"]["input_token_logprobs"][-6:], strict=True):
            assert abs(log_prob - item[0]) < 1e-3, (log_prob, item)
    greedy = sample(temperature=0.0)
    assert len({tuple(each["output_ids"]) for each in greedy}) == 1
    first = greedy[0]["output_ids"][0]
    narrow = sample(temperature=1.0, top_k=2)
    assert 1 < len({each["output_ids"][0] for each in narrow} | {first}) <= 2
    engine.shutdown()

if __name__ == "__main__":
    main()
    print("complete", flush=True)
"""


@pytest.mark.slow
def test_stock_sglang_samples_and_scores_alike(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script, model], capture_output=True, text=True, check=False, timeout=280)
    assert "complete" in run.stdout, run.stdout[-2000:] + run.stderr[-3000:]
