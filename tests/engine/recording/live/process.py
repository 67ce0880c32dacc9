"""A live engine, refitted there and back; run as a program it answers requests, one a line.

The trainer is a bag of tensors under a checkpoint's names: what is under test is the engine's side.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.support.cold import Request, answer, ask, end, start
from torch import nn

import reshard_trainer


@dataclass(frozen=True, slots=True)
class LiveRequest(Request):
    """What to start, and what to publish.

    Attributes:
        published: folders of checkpoints, in the order in which they are published; every second
            one in place.
        bucket_bytes: largest message.
    """

    published: tuple[str, ...] = ()
    bucket_bytes: int = 16 * 2**20


def bag(folder: Path) -> nn.Module:
    """A module whose parameters are the tensors of a checkpoint, under their names."""
    root = nn.Module()
    for name, tensor in load_file(folder / "model.safetensors").items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        if tensor.is_floating_point():
            at.register_parameter(last, nn.Parameter(tensor))
        else:
            at.register_buffer(last, tensor)
    return root


def draft_of(llm: Any) -> dict[str, dict[str, float]]:
    """Sums of the draft model's parameters: those that it shares with the target, and its own."""
    if llm.llm_engine.vllm_config.speculative_config is None:
        return {}
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    target = {parameter.data_ptr() for parameter in runner.get_model().parameters()} - {0}
    sums: dict[str, dict[str, float]] = {"shared": {}, "own": {}}
    for name, parameter in runner.get_draft_model().named_parameters():
        whose = "shared" if parameter.data_ptr() in target else "own"
        sums[whose][name] = float(parameter.detach().double().sum())
    return sums


def main() -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin:
        given = json.loads(line)
        for name in ("prompts", "published"):
            given[name] = tuple(tuple(x) if isinstance(x, list) else x for x in given[name])
        try:
            answer(run(LiveRequest(**given)))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def run(request: LiveRequest) -> dict[str, object]:
    """Start on the request's model, publish, and ask after each."""
    from vllm.config import WeightTransferConfig

    plain = Request(**{f.name: getattr(request, f.name) for f in fields(Request)})
    llm = start(plain, weight_transfer_config=WeightTransferConfig(backend="reshard"))
    try:
        said: list[Mapping[str, object]] = [{**ask(llm, request.prompts), "draft": draft_of(llm)}]
        reports = []
        for version, folder in enumerate(request.published):
            model = bag(Path(folder))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            with reshard_trainer.attach(
                model,
                optimizer,
                [reshard_trainer.InProcessEngine(llm)],
                deadline=60,
                version=version,
                install="in_place" if version % 2 else "staged",
                bucket_bytes=request.bucket_bytes,
            ) as hook:
                optimizer.step()
            assert hook.last_report is not None
            (engine,) = hook.last_report.engines.values()
            reports.append(
                {
                    "redundancy": engine.redundancy,
                    "direct": engine.direct_bytes,
                    "repacked": engine.repacked_bytes,
                    "computed": engine.computed_bytes,
                    "notes": engine.notes,
                }
            )
            said.append({**ask(llm, request.prompts), "draft": draft_of(llm)})
        return {"said": said, "reports": reports}
    finally:
        end(llm)


if __name__ == "__main__":
    main()
