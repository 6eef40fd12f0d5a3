"""Tests that launch their own engines: HTTP server with Llama in bfloat16, two tensor-parallel ranks, MoE; and that no
process or shared memory remains."""

import base64
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
import torch
from tidemill_testing import tiny_model
from tidemill_testing.ports import free_ports

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(280)]

PROMPTS = [[5, 6, 7], [9] * 20, list(range(3, 80))]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def shared_memory_of(pids):
    """Names in /dev/shm that contain one of `pids`, as sem.loky-PID-x or torch_PID_x."""
    return [name for name in os.listdir("/dev/shm") if {str(pid) for pid in pids} & set(re.split("[-_.]", name))]


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} not within {seconds} s"
        time.sleep(0.2)


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def is_ready(port, process):
    assert process.poll() is None, "the server exited while it started"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def test_http_server_with_bfloat16_llama_exits_when_its_scheduler_is_killed(tmp_path, reference):
    path = tiny_model(tmp_path / "llama", "llama", dtype=torch.bfloat16)
    port, nccl_port = free_ports(2)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(path), "--port", str(port)]
    command += ["--nccl-port", str(nccl_port), "--skip-tokenizer-init", "--log-level", "error"]
    no_compiler = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    server = subprocess.Popen(command, env=os.environ | no_compiler)
    try:
        wait_until(lambda: is_ready(port, server), 240, "start of the server")
        check_bfloat16(post(port, "/generate", request()), reference.load(path, torch.bfloat16), reference)

        penalized = request() | {"sampling_params": GREEDY | {"repetition_penalty": 1.2}}
        assert [len(output["output_ids"]) for output in post(port, "/generate", penalized)] == [8, 8, 8]

        new = reference.load(tiny_model(tmp_path / "new", "llama", seed=3, dtype=torch.bfloat16), torch.bfloat16)
        named = [(name, parameter.detach()) for name, parameter in new.named_parameters()]
        # Pickled by value: SGLang's MultiprocessingSerializer sends file descriptors, which the server accepts only
        # from processes with its own authentication key.
        payload = base64.b64encode(pickle.dumps(named)).decode()
        assert post(port, "/update_weights_from_tensor", {"serialized_named_tensors": [payload]})["success"]
        check_bfloat16(post(port, "/generate", request()), new, reference)

        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        scheduler = next(process for process in family if "scheduler" in " ".join(process.cmdline()))
        scheduler.send_signal(signal.SIGKILL)
        wait_until(lambda: server.poll() is not None, 60, "exit of the server after its scheduler was killed")
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []
        assert shared_memory_of([process.pid for process in family]) == []
    finally:
        if server.poll() is None:
            for process in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
                process.kill()
        server.wait()


def request():
    return {"input_ids": PROMPTS, "sampling_params": GREEDY, "return_logprob": True}


def check_bfloat16(outputs, model, reference):
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference.log_probs(model, prompt, output["output_ids"])
        torch.testing.assert_close(reference.engine_log_probs(output), expected, atol=0.1, rtol=0)


def test_two_tensor_parallel_ranks_over_gloo(tmp_path, reference):
    import sglang

    path = tiny_model(tmp_path / "qwen2", "qwen2")
    model = reference.load(path)
    others = set(psutil.Process().children(recursive=True))
    [nccl_port] = free_ports(1)
    engine = sglang.Engine(
        model_path=str(path), tp_size=2, nccl_port=nccl_port, skip_tokenizer_init=True, log_level="error"
    )
    try:
        outputs = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output["output_ids"] == reference.greedy(model, prompt, 8)
            expected = reference.log_probs(model, prompt, output["output_ids"])
            torch.testing.assert_close(reference.engine_log_probs(output), expected, atol=1e-4, rtol=0)
        new = reference.load(tiny_model(tmp_path / "new", "qwen2", seed=3))
        assert engine.update_weights_from_tensor([(n, p.detach()) for n, p in new.named_parameters()])[0]
        output = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert output["output_ids"] == reference.greedy(new, PROMPTS[0], 8)
        started = set(psutil.Process().children(recursive=True)) - others
        assert len(started) >= 3  # two schedulers and the detokenizer
    finally:
        engine.shutdown()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    assert shared_memory_of([process.pid for process in started]) == []


def test_moe_answers_and_routed_experts(tmp_path, reference):
    import sglang
    from sglang.srt.state_capturer.routed_experts import extract_routed_experts_from_meta_info

    num_layers, top_k = 3, 2
    path = tiny_model(tmp_path / "moe", "qwen3_moe", num_hidden_layers=num_layers, num_experts=8)
    model = reference.load(path)
    arguments = {"chunked_prefill_size": 32, "skip_tokenizer_init": True, "log_level": "error"}
    arguments["nccl_port"] = free_ports(1)[0]
    engine = sglang.Engine(model_path=str(path), enable_return_routed_experts=True, **arguments)
    try:
        for _ in range(2):  # the second time the prompts are in the prefix cache
            outputs = engine.generate(
                input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, return_routed_experts=True
            )
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert output["output_ids"] == reference.greedy(model, prompt, 8)
                expected = reference.log_probs(model, prompt, output["output_ids"])
                torch.testing.assert_close(reference.engine_log_probs(output), expected, atol=1e-4, rtol=0)
                experts = torch.from_numpy(extract_routed_experts_from_meta_info(output).copy())
                tokens = [*prompt, *output["output_ids"]]
                with torch.no_grad():
                    logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
                chosen = torch.stack([layer.topk(top_k, -1).indices for layer in logits], 1)
                assert torch.equal(experts.view(-1, num_layers, top_k), chosen[:-1].int())  # not of the last token
        new = reference.load(tiny_model(tmp_path / "new", "qwen3_moe", num_hidden_layers=3, num_experts=8, seed=3))
        assert engine.update_weights_from_disk(str(tmp_path / "new"))[0]
        output = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert output["output_ids"] == reference.greedy(new, PROMPTS[0], 8)
    finally:
        engine.shutdown()
