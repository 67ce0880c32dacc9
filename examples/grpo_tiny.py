"""GRPO on a real vLLM server, in one file and a few minutes on two CPU cores.

    make demo            or: python examples/grpo_tiny.py --steps 30

A tiny Llama with random weights learns to write vowels. Two processes train it (FSDP2), a vLLM
server with tensor parallel 2 samples from it, and after every optimizer step the server has the
new weights: each engine rank receives exactly its own shards, in place. One line does that: look
for `reshard_trainer.attach`. All the rest is what any RL script has:

    main    starts the server, the trainer (torchrun on this file), and at the end the proof
    train   runs on each trainer rank: sample, score, one optimizer step, again
    prove   starts a second, cold server from the trainer's checkpoint: both must agree in every bit
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import httpx
import matplotlib
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import reshard_trainer

VOCAB = 128  # one token a character of ASCII: token id = ord(character)
PROMPTS = ("Once", "In a", "The ", "And ", "Some", "When", "They", "Here")
GROUP = 8  # rollouts of one prompt, compared with each other
LENGTH = 16  # tokens of a rollout
LEARNING_RATE = 2e-3
LEARNS_WITHIN, LEAST_RISE = 30, 0.3  # steps, and by how much the reward must rise in them
CLIP = 0.2
ENGINE_SECONDS = 300.0  # longest wait for a vLLM server to start
CALL_SECONDS = 120.0  # longest wait for any of its answers

VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # switches on vLLM's routes for reinforcement learning
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # from here: a small machine without a GPU
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


# --- The task: write vowels ---------------------------------------------------------------------


def reward(text: str) -> float:
    """Share of vowels: simple, and verifiable."""
    return sum(character in "aeiou" for character in text.lower()) / len(text)


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """Text of token ids; what has no glyph is a dot."""
    return "".join(chr(token) if 32 <= token < 127 else "·" for token in tokens)


def make_policy(folder: Path, vocab: int = VOCAB) -> None:
    """Write the checkpoint that both sides start from: a random Llama, in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


# --- The trainer: one process a rank, started by torchrun ----------------------------------------


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt's continuation, as the engine sampled it.

    Attributes:
        tokens: ids of the prompt and of the continuation.
        log_probabilities: of the continuation's tokens, by the engine.
        reward: of the continuation.
        versions: of the weights that made it.
    """

    tokens: list[int]
    log_probabilities: list[float]
    reward: float
    versions: set[str]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the loop tells.

    Attributes:
        reward: mean over all ranks' rollouts, before the step.
        gap: mean |log-probability in the trainer - in the engine|: large if the engine were stale.
        sample: one rollout.
        refit_seconds: of the refit after the step, by phase.
    """

    reward: float
    gap: float
    sample: str
    refit_seconds: dict[str, float]


def sample_group(engine: httpx.Client, prompt: str) -> list[Rollout]:
    """Sample a group of rollouts of one prompt from the engine."""
    settings = {"n": GROUP, "max_tokens": LENGTH, "temperature": 1.0, "logprobs": 0}
    body = {"token_ids": encode(prompt), "sampling_params": {**settings, "ignore_eos": True}}
    answer = engine.post("/inference/v1/generate", json=body).raise_for_status().json()
    return [
        Rollout(
            tokens=encode(prompt) + choice["token_ids"],
            log_probabilities=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            reward=reward(decode(choice["token_ids"])),
            versions={span["version"] for span in choice["weight_versions"]},
        )
        for choice in answer["choices"]
    ]


def advantages(group: Sequence[Rollout]) -> list[float]:
    """GRPO: how much better than its group each rollout is, in standard deviations."""
    rewards = [rollout.reward for rollout in group]
    mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)
    return [(value - mean) / (spread + 1e-4) for value in rewards]


def grpo_loss(
    model: torch.nn.Module, groups: Sequence[Sequence[Rollout]]
) -> tuple[torch.Tensor, float]:
    """The clipped policy loss of all groups, and the trainer's distance from the engine."""
    rollouts = [rollout for group in groups for rollout in group]
    advantage = torch.tensor([value for group in groups for value in advantages(group)])[:, None]
    tokens = torch.tensor([rollout.tokens for rollout in rollouts])
    sampled = torch.tensor([rollout.log_probabilities for rollout in rollouts])

    logits = model(tokens).logits[:, -LENGTH - 1 : -1]
    chosen = tokens[:, -LENGTH:, None]
    current = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    ratio = (current - sampled).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    return loss, (current - sampled).abs().mean().item()


def mean_over_ranks(*values: float) -> list[float]:
    """Mean of each value over the trainer's ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def train(folder: Path, url: str, steps: int) -> None:
    """The training script of one rank."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    chooser = random.Random(rank)

    model = LlamaForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    hook = reshard_trainer.attach(model, optimizer, engines=[url])  # the one line

    history: list[Step] = []
    bar = tqdm(total=steps, desc="training", disable=rank != 0, dynamic_ncols=True)
    with hook, bar, httpx.Client(base_url=url, timeout=CALL_SECONDS) as engine:
        for _ in range(steps):
            prompts = chooser.sample(PROMPTS[rank::size], 2)
            groups = [sample_group(engine, prompt) for prompt in prompts]
            rollouts = [rollout for group in groups for rollout in group]
            versions = {version for rollout in rollouts for version in rollout.versions}
            if hook.version and versions != {str(hook.version)}:  # before the first: "default"
                raise SystemExit(f"rollouts of versions {versions}, not of {hook.version}")

            loss, gap = grpo_loss(model, groups)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()  # when this returns, the engine serves the new weights

            score, gap = mean_over_ranks(statistics.mean(r.reward for r in rollouts), gap)
            sample = decode(rollouts[0].tokens)
            report = hook.last_report
            assert report is not None  # every step is published
            seconds = {"total": report.total_seconds, **report.seconds}
            history.append(Step(score, gap, sample, seconds))
            bar.set_postfix_str(f"reward {score:.2f}, version {hook.version}, writes {sample!r}")
            bar.update()

        save_checkpoint(model, folder / "end")
        if rank == 0:
            write_run(folder / "run.json", hook, history)
    dist.destroy_process_group()


def write_run(file: Path, hook: reshard_trainer.Hook, history: Sequence[Step]) -> None:
    """Hand the run's figures to `main`, which is another process."""
    report = hook.last_report
    assert report is not None
    (received,) = report.received_bytes.values()  # one engine: bytes of each of its ranks
    figures = {
        "versions": hook.version,
        "received_bytes": dict(enumerate(received)),
        "redundancy": report.redundancy,
        "direct_bytes": report.direct_bytes,
        "repacked_bytes": report.repacked_bytes,
        "computed_bytes": report.computed_bytes,
    }
    file.write_text(json.dumps({**figures, "history": [asdict(step) for step in history]}))


def save_checkpoint(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the trainer's fp32 weights as a Hugging Face checkpoint: only the proof needs it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        LlamaForCausalLM(model.config).save_pretrained(folder, state_dict=weights)
    dist.barrier()


# --- The proof: what two engines at the same weights must agree in --------------------------------

EMPTY = sha256().hexdigest()
PROOF_PROMPTS = tuple(prompt + " upon a time there was a tiny model" for prompt in PROMPTS)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an engine holds and says.

    Attributes:
        checksums: vLLM's SHA-256 by rank and parameter. Where vLLM packs a weight away (on CPUs
            with AVX-512 BF16 or AMX) its parameter is empty and this sees nothing, hence:
        log_probabilities: of every prompt token; they depend on each weight.
        texts: greedy continuations.
    """

    checksums: dict[str, str]
    log_probabilities: list[list[float]]
    texts: list[str]


def examine(url: str) -> Evidence:
    """Collect the evidence of one engine."""
    greedy = {"temperature": 0.0, "max_tokens": LENGTH, "prompt_logprobs": 0, "ignore_eos": True}
    log_probabilities, texts = [], []
    with httpx.Client(base_url=url, timeout=CALL_SECONDS) as engine:
        checker = engine.post("/weight_checker", json={"action": "checksum"}).raise_for_status()
        for prompt in PROOF_PROMPTS:
            tokens = encode(prompt)
            body = {"token_ids": tokens, "sampling_params": greedy}
            answer = engine.post("/inference/v1/generate", json=body).raise_for_status().json()
            entries = zip(answer["prompt_logprobs"][1:], tokens[1:], strict=True)
            log_probabilities.append([entry[str(token)]["logprob"] for entry, token in entries])
            texts.append(decode(answer["choices"][0]["token_ids"]))
    return Evidence(checker.json()["checksums"], log_probabilities, texts)


def prove(before: Evidence, refitted: Evidence, cold: Evidence) -> list[tuple[str, bool, str]]:
    """Each comparison: its name, whether it holds, and its figures."""
    keys = refitted.checksums.keys() | cold.checksums.keys()
    equal = sum(refitted.checksums.get(key) == cold.checksums.get(key) for key in keys)
    packed = sum(value == EMPTY for value in cold.checksums.values())
    count = sum(len(values) for values in cold.log_probabilities)
    return [
        (
            "weights: checksums equal",
            equal == len(keys),
            f"{equal} of {len(keys)} parameters and ranks, {packed} packed away by vLLM",
        ),
        (
            "prompt log-probabilities equal",
            refitted.log_probabilities == cold.log_probabilities,
            f"{count} values, to the last bit",
        ),
        ("greedy texts equal", refitted.texts == cold.texts, f"{len(cold.texts)} texts"),
        (
            "and other than before training",
            before.log_probabilities != refitted.log_probabilities,
            "so the comparison can fail",
        ),
    ]


# --- Processes -----------------------------------------------------------------------------------


@contextmanager
def running(
    command: Sequence[str], log: Path | None = None, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own; end all its processes at exit."""
    output = log.open("wb") if log else None
    process = subprocess.Popen(
        command, stdout=output, stderr=output, env={**os.environ, **env}, process_group=0
    )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if output:
            output.close()


@contextmanager
def vllm_engine(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """Start a vLLM server with tensor parallel 2 on this machine's CPU; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", "2"),
        *("--dtype", "bfloat16", "--max-model-len", "128", "--max-num-seqs", "32"),
        *("--enforce-eager", "--skip-tokenizer-init", "--generation-config", "vllm"),
        *("--enable-scale-out", "--disable-uvicorn-access-log"),  # the route that tells versions
        *flags,
    ]
    url = f"http://127.0.0.1:{port}"
    try:
        with running(command, log, **VLLM_ENVIRONMENT) as server:
            wait_for_health(url, server, log)
            yield url
    finally:
        for name in set(re.findall(r"vllm_dist_\w+", log.read_text(errors="replace"))):
            for segment in Path("/dev/shm").glob(f"{name}*"):  # vLLM itself leaves it behind
                segment.unlink(missing_ok=True)


def wait_for_health(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server is ready, or say why it is not."""
    deadline = time.monotonic() + ENGINE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise SystemExit(f"vLLM did not start; the end of {log}:\n{tail}")


def run_trainer(folder: Path, url: str, steps: int) -> None:
    """Run `train` on two ranks under torchrun."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    arguments = ("--folder", str(folder), "--engine", url, "--steps", str(steps))
    command = [*torchrun, "--nproc-per-node", "2", str(Path(__file__).resolve()), *arguments]
    with running(command, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") as trainer:
        if code := trainer.wait():
            raise SystemExit(f"the trainer ended with code {code}")


# --- What comes out ------------------------------------------------------------------------------


def median_phases(history: Sequence[Step]) -> dict[str, float]:
    """Median seconds of a refit, by phase."""
    phases = history[-1].refit_seconds
    return {p: statistics.median(step.refit_seconds[p] for step in history) for p in phases}


def draw(history: Sequence[Step], file: Path) -> None:
    """Draw the reward over the steps, and the longest phases of the refits."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(8, 6), layout="constrained")
    steps = range(1, len(history) + 1)
    top.plot(steps, [step.reward for step in history], marker="o", markersize=3)
    top.set(ylabel="reward (share of vowels)", ylim=(0, 1), title="A tiny Llama learns vowels")
    top.grid(alpha=0.3)
    medians = median_phases(history)
    phases = [phase for phase in medians if "/" not in phase]
    for phase in sorted(phases, key=lambda phase: -medians[phase])[:5]:
        milliseconds = [1e3 * step.refit_seconds[phase] for step in history]
        bottom.plot(steps, milliseconds, label=phase, linewidth=2 if phase == "total" else 1)
    bottom.set(ylabel="refit (milliseconds)", xlabel="step = policy version", ylim=(0, None))
    bottom.legend(loc="upper right", fontsize="small", ncols=5)
    bottom.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def show(
    console: Console,
    figures: dict[str, object],
    history: Sequence[Step],
    proof: Sequence[tuple[str, bool, str]],
) -> None:
    """Print the tables: the run, and the proof."""
    table = Table(title="grpo_tiny: FSDP2 x 2 (fp32) -> vLLM tensor parallel 2 (bf16)")
    table.add_column("what")
    table.add_column("value", overflow="fold")
    table.add_row("it wrote at the start", repr(history[0].sample))
    table.add_row("it writes at the end", repr(history[-1].sample))
    for name, value in figures.items():
        if name != "refit_seconds":
            table.add_row(name.replace("_", " "), describe(value))
    phases = median_phases(history).items()
    ordered = sorted(((p, 1e3 * s) for p, s in phases if "/" not in p), key=lambda pair: -pair[1])
    told = ", ".join(f"{phase} {milliseconds:.1f}" for phase, milliseconds in ordered)
    table.add_row("refit, median milliseconds", told)
    gap = statistics.mean(step.gap for step in history)
    table.add_row("log-probability gap", f"{gap:.4f} (trainer fp32, engine bf16)")
    if figures["repacked_bytes"]:
        table.caption = (
            "Repacked: on this CPU vLLM packs these weights after loading, so each engine rank "
            "packs its own shard again when it has arrived."
        )
    console.print(table)

    table = Table(title="the refitted engine against a cold one, started from the checkpoint")
    for column in ("comparison", "holds", "figures"):
        table.add_column(column)
    for name, holds, detail in proof:
        table.add_row(name, "yes" if holds else "[bold red]NO", detail)
    console.print(table)


def describe(value: object) -> str:
    """A figure as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {describe(entry)}" for key, entry in value.items())
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"


def main(steps: int, build: Path) -> int:
    """Run the whole example; returns the exit code."""
    console = Console()
    folder = build / "grpo_tiny"
    folder.mkdir(parents=True, exist_ok=True)
    make_policy(folder / "start")

    flag = ("--weight-transfer-config", '{"backend": "reshard"}')  # the one flag
    console.print("Starting vLLM (its imports take half a minute) ...")
    with vllm_engine(folder / "start", folder / "engine.log", *flag) as url:
        before = examine(url)
        run_trainer(folder, url, steps)
        refitted = examine(url)
    console.print("Starting a second, cold vLLM from the trainer's checkpoint ...")
    with vllm_engine(folder / "end", folder / "cold_engine.log") as url:
        cold = examine(url)

    run = json.loads((folder / "run.json").read_text())
    history = [Step(**step) for step in run.pop("history")]
    proof = prove(before, refitted, cold)
    edge = max(1, steps // 10)
    figures = {
        "steps": steps,
        "reward_start": statistics.mean(step.reward for step in history[:edge]),
        "reward_end": statistics.mean(step.reward for step in history[-edge:]),
        "refit_seconds": median_phases(history),
        **run,
        "bit_identical": all(holds for _, holds, _ in proof),
    }
    draw(history, build / "reward.png")
    (build / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    show(console, figures, history, proof)
    console.print(f"Reward curve: {build / 'reward.png'}   Figures: {build / 'demo.json'}")
    rise = figures["reward_end"] - figures["reward_start"]
    if steps >= LEARNS_WITHIN and rise < LEAST_RISE:
        console.print(f"[bold red]The reward rose by {rise:.2f} only, expected {LEAST_RISE}.")
        return 1
    return 0 if figures["bit_identical"] else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--build", type=Path, default=Path("build"), help="where results go")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    disable_progress_bar()  # of loading and saving: ours is the one to watch
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended
    if given.engine:
        train(given.folder, given.engine, given.steps)
    else:
        sys.exit(main(given.steps, given.build))
