"""What people should know of a refit that goes well: what it leaves as it was, or makes up."""

from collections.abc import Iterator, Sequence
from typing import Final

from vllm.config import VllmConfig

from reshard.session import TensorSpec
from reshard_vllm.install.evidence import Proof
from reshard_vllm.install.shadow import constants_of
from reshard_vllm.recording.loader_map import LoaderMap

_MANY: Final = 8


def notes_of(
    config: VllmConfig, recorded: LoaderMap, proof: Proof, specs: Sequence[TensorSpec]
) -> tuple[str, ...]:
    """One line each, for the report.

    Args:
        config: of the rank's worker.
        recorded: the loader's map for the trainer's tensors.
        proof: of the engine's own checkpoint.
        specs: the trainer's tensors.
    """
    return (*_made_up(recorded, proof, specs), *_whole(recorded), *_draft(config))


def _made_up(recorded: LoaderMap, proof: Proof, specs: Sequence[TensorSpec]) -> Iterator[str]:
    """Elements that the engine's checkpoint filled, and that become constants."""
    if proof.covered is None:
        return
    missing = sorted({*proof.order} - {spec.name for spec in specs})
    for key, count in constants_of(recorded).items():
        more = count - proof.constants.get(key, 0)
        if more > 0:
            yield (
                f"{key}: {more} elements that the engine's checkpoint filled become constants, as "
                f"its loader makes them without a tensor; not published: {_some(missing)}"
            )


def _whole(recorded: LoaderMap) -> Iterator[str]:
    """More travels than the rank keeps, because the loader's arithmetic mixes elements."""
    for key, excess in recorded.landings.excess.items():
        yield (
            f"{key}: {excess.nbytes} bytes more than it keeps travel, because its loader computes "
            f"it from all of {_some(excess.names)} ({_some(excess.operations)})"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(names[:_MANY]) + more


def _draft(config: VllmConfig) -> Iterator[str]:
    """A draft model is loaded apart; a refit reaches what it shares with the target only."""
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is not None and draft is not None:
        yield (
            f"draft model {draft.model} ({speculative.method}): stays at the weights that the "
            "engine started with, but for modules that it shares with the target"
        )
