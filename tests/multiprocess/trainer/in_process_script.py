"""A trainer and a real `vllm.LLM` in one process; prints what came of it as one line of JSON.

Run as `python -m tests.multiprocess.trainer.in_process_script FOLDER TENSOR_PARALLEL`.
"""

import json
import sys
from pathlib import Path

import torch
from tests.support.checkpoints import make_checkpoint, make_model

import reshard_trainer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = 8


def main(folder: Path, tensor_parallel: int) -> None:
    """Refit an engine of weights 1 with weights 2, twice, through two hooks."""
    # Not at the top: pytest imports every module for its doctests, and vLLM warns.
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    make_checkpoint(folder, "llama", seed=1)
    llm = LLM(
        str(folder),
        tensor_parallel_size=tensor_parallel,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        weight_transfer_config=WeightTransferConfig(backend="reshard"),
    )
    model = make_model("llama", seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = reshard_trainer.InProcessEngine(llm)
    said = []
    for version in (0, 6):
        with reshard_trainer.attach(
            model, optimizer, [engine], deadline=60, version=version
        ) as hook:
            optimizer.step()
            report = hook.last_report
        assert report is not None
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        output = llm.generate([{"prompt_token_ids": PROMPT}], sampling)[0].outputs[0]
        spans = [(span.version, span.start, span.end) for span in output.weight_versions]
        said.append(
            {
                "tokens": list(output.token_ids),
                "spans": spans,
                "redundancy": report.redundancy,
                "received": report.received_bytes[engine.name],
            }
        )
    print(json.dumps({"said": said, "expected": greedy(model.to(torch.bfloat16))}))


def greedy(model: torch.nn.Module) -> list[int]:
    """What the trainer's own model says, in the engine's dtype."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(PROMPT) :].tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
