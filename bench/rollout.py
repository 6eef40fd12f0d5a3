"""Throughput of episodes, overhead per turn and memory per session, next to the bare engine in one run.

    python bench/rollout.py               CPU, two minutes
    python bench/rollout.py --no-engine   overhead and memory only, without SGLang
    python bench/rollout.py --profile     the functions that cost most per turn
    python bench/rollout.py --tiny        checks that the benchmark runs; the numbers mean nothing

The model is a tiny Qwen3 with random weights and Qwen3's chat template. Overhead without an engine and memory are those
with a vocabulary as large as Qwen3's. The bare engine receives the same requests
through `Engine.async_generate`, in alternating rounds; each number is the minimum of all rounds. The overhead is that
of the process that runs the sessions, in CPU time, which other jobs on the machine hardly change, and in wall time. An
idle engine needs longer for its next request, so for one session the wall time outside the engine is printed too.
"""

import argparse
import asyncio
import cProfile
import functools
import gc
import json
import os
import pstats
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tidemill_rollout import (
    Endpoint,
    Engine,
    Generation,
    Policy,
    Problem,
    SamplingParams,
    Session,
    SessionConfig,
    SGLangEngine,
)
from tidemill_rollout.episodes import single_turn
from tidemill_rollout.sglang import sglang_sampling
from tidemill_testing import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = Path(__file__).parent.parent / "packages/rollout/tests/templates/qwen3.jinja"
NUM_TOKENS = 16
VOCABULARY = 1024
VOCABULARY_OF_QWEN3 = 151_669
LIMITS_MS = {"one turn": 2.0, "two turns": 2.0, "two turns, HTTP": 5.0}
EpisodeOf = Callable[[Policy, int], Awaitable[None]]
SINGLE_TURN = single_turn(lambda solution_str, **_: float(len(solution_str)))
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, extra={"ignore_eos": True})
QUESTIONS = [
    "The numbers are 12, 7 and 30. What is their sum? Think first.",
    "That is not right. Please check the numbers and answer again with one number.",
    "Explain in one sentence how you got this result.",
    "Now multiply the result by two.",
]


class ReadyEngine:
    """An engine that replies at once with random tokens."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self._random = random.Random(0)
        self._ids = range(vocab_size)
        self._num_tokens = num_tokens

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        return Generation(
            token_ids=self._random.choices(self._ids, k=self._num_tokens),
            log_probs=[-self._random.random() for _ in range(self._num_tokens)],
            finish_reason="length",
            versions=[("0", self._num_tokens)],
        )


class RecordingEngine:
    """Pass requests on; keep them by session, and the seconds that each took in `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: dict[str, list[tuple[Sequence[int], SamplingParams]]] = {}
        self.seconds: list[float] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        self.requests.setdefault(session_id, []).append((token_ids, sampling))
        started = time.perf_counter()
        generation = await self._engine.generate(token_ids, sampling, session_id=session_id)
        self.seconds.append(time.perf_counter() - started)
        return generation


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with `VOCABULARY` tokens that occur, and others up to `vocab_size`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEMPLATE.read_text(), *QUESTIONS], trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"unused{number}": number for number in range(len(vocabulary), vocab_size - 2)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=special[:-1],
        chat_template=TEMPLATE.read_text(),
    )


async def converse(session: Session, num_turns: int) -> None:
    """Run an episode of `num_turns` questions."""
    messages: list[dict[str, Any]] = []
    for question in QUESTIONS[:num_turns]:
        messages.append({"role": "user", "content": question})
        messages.append((await session.generate(messages)).message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Wall time and CPU time of this process, in seconds."""

    wall_s: float
    cpu_s: float


async def measure(run: Callable[[], Awaitable[object]]) -> Cost:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    await run()
    return Cost(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


async def alternate(rounds: int, *runs: Callable[[], Awaitable[object]]) -> list[list[Cost]]:
    """Run the functions alternately and return the costs of each round by function, without a first round."""
    costs: list[list[Cost]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, found in zip(runs, costs, strict=True):
            cost = await measure(run)
            if number > 0:
                found.append(cost)
    return costs


def minimum(costs: list[Cost]) -> Cost:
    return Cost(wall_s=min(cost.wall_s for cost in costs), cpu_s=min(cost.cpu_s for cost in costs))


async def one_turn(policy: Policy, seed: int) -> None:
    """Run an episode with a reward function, as the trainer does."""
    await policy.run(SINGLE_TURN, Problem(prompt=QUESTIONS[0], ordinal=seed), seed=seed, timeout_s=600)


async def two_turns(policy: Policy, seed: int) -> None:
    await converse(policy.session(seed=seed), 2)


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session, body: Any) -> Any:
    """Send a request over an open connection. httpx and openai take several times as long as the endpoint."""
    content = json.dumps(body).encode()
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    content = await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
    assert " 200 " in head.partition("\r\n")[0], content
    return json.loads(content)


def two_turns_over_http(endpoint: Endpoint) -> EpisodeOf:
    """Return `two_turns` with a client in the same process, whose time is included."""

    async def run(policy: Policy, seed: int) -> None:
        session = policy.session(seed=seed)
        endpoint.add(session)
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(session.base_url).port)
        messages: list[dict[str, Any]] = []
        for question in QUESTIONS[:2]:
            messages.append({"role": "user", "content": question})
            response = await post(reader, writer, session, {"model": "policy", "messages": messages})
            messages.append(response["choices"][0]["message"])
        writer.close()
        await writer.wait_closed()
        endpoint.remove(session)

    return run


async def compare(
    engine: Any, tokenizer: PreTrainedTokenizerFast, size: int, rounds: int, episodes: dict[str, EpisodeOf]
) -> dict[str, float]:
    """Print throughput and overhead of `size` concurrent episodes of each kind; return the overheads per turn in ms."""
    recording = RecordingEngine(SGLangEngine(engine))
    policy = Policy(recording, tokenizer, SessionConfig(sampling=SAMPLING))
    repeats = max(1, 32 // size)  # episodes after each other, so that a round is not too short

    async def sessions(episode: EpisodeOf) -> None:
        recording.requests.clear()
        for _ in range(repeats):
            await asyncio.gather(*(episode(policy, seed) for seed in range(size)))

    async def bare_episode(requests: list[tuple[Sequence[int], SamplingParams]]) -> None:
        for token_ids, sampling in requests:
            await engine.async_generate(
                input_ids=list(token_ids), sampling_params=sglang_sampling(sampling), return_logprob=True
            )

    async def bare() -> None:
        requests = list(recording.requests.values())
        for start in range(0, len(requests), size):
            await asyncio.gather(*(bare_episode(each) for each in requests[start : start + size]))

    kinds = [functools.partial(sessions, episode) for episode in episodes.values()]
    *costs, plain = await alternate(rounds, *kinds, bare)
    turns = sum(len(requests) for requests in recording.requests.values())
    overheads, base = {}, minimum(plain)
    for name, found in zip(["bare", *episodes], [plain, *costs], strict=True):
        best = minimum(found)
        speed = statistics.median(b.wall_s / a.wall_s for a, b in zip(found, plain, strict=True))
        cpu, wall = (1e3 * more / turns for more in (best.cpu_s - base.cpu_s, best.wall_s - base.wall_s))
        rates = f"{size * repeats / best.wall_s:14.1f}{turns * NUM_TOKENS / best.wall_s:12.0f}"
        print(f"{name:16}{size:10}{rates}", end="")
        print("" if name == "bare" else f"{speed:10.2f}{cpu:12.3f}{wall:12.3f}")
        overheads[name] = cpu
    return overheads


async def throughput(
    engine: Any, tokenizer: PreTrainedTokenizerFast, sizes: list[int], rounds: int
) -> dict[str, float]:
    """Print all comparisons with the bare engine; return the largest overhead per turn in ms by kind of episode."""
    print(f"\nepisodes with replies of {NUM_TOKENS} tokens, minimum of {rounds} rounds; CPU and wall: more than bare")
    print(f"{'':16}{'sessions':>10}{'episodes/s':>14}{'tokens/s':>12}{'of bare':>10}{'CPU ms/turn':>12}{'wall':>12}")
    worst: dict[str, float] = {}
    async with Endpoint() as endpoint:
        http = two_turns_over_http(endpoint)
        comparisons: list[tuple[int, dict[str, EpisodeOf]]] = [(sizes[-1], {"one turn": one_turn})]
        comparisons += [(size, {"two turns": two_turns, "two turns, HTTP": http}) for size in sizes]
        for size, episodes in comparisons:
            for name, ms in (await compare(engine, tokenizer, size, rounds, episodes)).items():
                worst[name] = max(worst.get(name, ms), ms)
        print("\none session at a time, median wall time per turn in ms")
        for name, episode in {"two turns": two_turns, "two turns, HTTP": http}.items():
            ms = await outside_engine(engine, tokenizer, name, episode, 8 * rounds)
            worst[name] = max(worst[name], ms)
    return worst


async def outside_engine(
    engine: Any, tokenizer: PreTrainedTokenizerFast, name: str, episode: EpisodeOf, num_episodes: int
) -> float:
    """Print and return the median wall time of a turn in ms without the time that its request is in the engine."""
    recording = RecordingEngine(SGLangEngine(engine))
    policy = Policy(recording, tokenizer, SessionConfig(sampling=SAMPLING))
    outside, inside = [], []
    for seed in range(num_episodes):
        recording.seconds.clear()
        started = time.perf_counter()
        await episode(policy, seed)
        inside.append(statistics.mean(recording.seconds))
        outside.append((time.perf_counter() - started) / len(recording.seconds) - inside[-1])
    ms = 1e3 * statistics.median(outside)
    print(f"{name:16} outside the engine {ms:.2f}, in the engine {1e3 * statistics.median(inside):.1f}")
    return ms


async def overhead(tokenizer: PreTrainedTokenizerFast, rounds: int, num_sessions: int) -> None:
    """Print the time of a turn without an engine: of an episode of one text, and by position in a conversation."""
    recording = RecordingEngine(ReadyEngine(len(tokenizer), NUM_TOKENS))
    policy = Policy(recording, tokenizer, SessionConfig(sampling=SAMPLING))

    async def run(episode: EpisodeOf) -> None:
        recording.requests.clear()
        for seed in range(num_sessions):
            await episode(policy, seed)

    async def bare() -> None:
        for session_id, requests in list(recording.requests.items()):
            for token_ids, sampling in requests:
                await recording._engine.generate(token_ids, sampling, session_id=session_id)

    async def ms_of(episode: EpisodeOf) -> tuple[float, float]:
        ours, plain = await alternate(rounds, lambda: run(episode), bare)
        return 1e3 * minimum(ours).cpu_s / num_sessions, 1e3 * minimum(plain).cpu_s / num_sessions

    print("\nturn with an engine that replies at once, CPU time per turn in ms")
    total, total_bare = await ms_of(one_turn)
    print(f"text:   session {total:6.3f}, engine alone {total_bare:6.3f}")
    before, before_bare = 0.0, 0.0
    for count in range(1, len(QUESTIONS) + 1):
        total, total_bare = await ms_of(lambda policy, seed, count=count: converse(policy.session(seed=seed), count))
        print(f"turn {count}: session {total - before:6.3f}, engine alone {total_bare - before_bare:6.3f}")
        before, before_bare = total, total_bare


async def profile(tokenizer: PreTrainedTokenizerFast, num_sessions: int) -> None:
    """Print the functions that cost most per two-turn episode."""
    policy = Policy(ReadyEngine(len(tokenizer), NUM_TOKENS), tokenizer, SessionConfig(sampling=SAMPLING))
    await converse(policy.session(), 2)
    profiler = cProfile.Profile()
    profiler.enable()
    for seed in range(num_sessions):
        await converse(policy.session(seed=seed), 2)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30).sort_stats("cumulative").print_stats(45)


async def memory(tokenizer: PreTrainedTokenizerFast, num_sessions: int, num_tokens: int = 200) -> None:
    """Print the memory of sessions of four turns, as the growth of this process."""
    policy = Policy(ReadyEngine(len(tokenizer), num_tokens), tokenizer)
    await converse(policy.session(), 4)
    gc.collect()
    before, kept = resident_bytes(), []
    for seed in range(num_sessions):
        session = policy.session(seed=seed)
        await converse(session, 4)
        kept.append(session)
    gc.collect()
    each = (resident_bytes() - before) / num_sessions
    tokens = sum(len(row.token_ids) for row in kept[0].trajectories())
    print(f"\n{num_sessions} sessions of 4 turns x {num_tokens} tokens ({tokens} with prompts): ", end="")
    print(f"{each / 1e3:.1f} kB per session, {each / tokens:.0f} bytes per token")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def with_sglang(
    folder: Path, tokenizer: PreTrainedTokenizerFast, sizes: list[int], rounds: int
) -> dict[str, float]:
    import sglang

    path = tiny_model(folder, vocab_size=len(tokenizer), max_position_embeddings=1024)
    engine = sglang.Engine(
        model_path=str(path),
        device="cpu",
        skip_tokenizer_init=True,
        max_running_requests=512,
        log_level="warning",
    )
    try:
        return await throughput(engine, tokenizer, sizes, rounds)
    finally:
        engine.shutdown()


def main() -> int:
    """Return 0 if the overheads per turn are within their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    tokenizer = build_tokenizer(VOCABULARY_OF_QWEN3)
    if args.profile:
        asyncio.run(profile(tokenizer, 500))
        return 0
    rounds, sizes, num_sessions = (1, [1, 4], 50) if args.tiny else (args.rounds, [1, 64, 512], 5000)
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f} at the start")
    asyncio.run(overhead(tokenizer, rounds, 10 if args.tiny else 200))
    asyncio.run(memory(tokenizer, num_sessions))
    if args.no_engine:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        worst = asyncio.run(with_sglang(Path(folder), build_tokenizer(VOCABULARY), sizes, rounds))
    print()
    for name, limit in LIMITS_MS.items():
        result = "ok" if worst[name] <= limit else "MISSED"
        print(f"{name}: at most {worst[name]:.2f} ms per turn more than the engine, limit {limit} ms: {result}")
    return 0 if all(worst[name] <= limit for name, limit in LIMITS_MS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
