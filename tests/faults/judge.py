"""Judges a struck refit from outside: reads the engine's memory itself, and the errors' texts.

Shares no code with the product: expected values come from the index-coded model, the cut is
torch.chunk's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tests.faults.cases import Case
from tests.faults.engine import FaultyEngine, live_file
from tests.multiprocess.trainer.models import make_indexed
from tests.multiprocess.trainer.trainers import STEP

Outcome = Literal["old", "new", "fenced", "mixed"]


class Reader:
    """Reads an engine's live tensors out of its memory."""

    def __init__(self, folder: Path, cuts: Mapping[str, int], size: int) -> None:
        model = make_indexed()
        moved = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._parts: list[tuple[np.ndarray, bool, np.ndarray]] = []
        for name, whole in model.state_dict().items():
            for rank in range(size):
                part = _part(whole, cuts.get(name), size, rank)
                if part.numel():
                    held = np.memmap(live_file(folder, rank, name), dtype=np.float32, mode="r")
                    self._parts.append((held, name in moved, part.numpy().reshape(-1)))

    def holds(self, version: int | None) -> bool:
        """Whether every element on every rank is of this version; None: never written."""
        return all(
            np.array_equal(held, np.zeros_like(first))
            if version is None
            else np.array_equal(held, first + np.float32(version * STEP if moves else 0))
            for held, moves, first in self._parts
        )


def _part(whole: torch.Tensor, dim: int | None, size: int, rank: int) -> torch.Tensor:
    if dim is None:
        return whole.contiguous()
    chunks = whole.chunk(size, dim)
    return chunks[rank].contiguous() if rank < len(chunks) else whole.new_empty(0)


def judge(reader: Reader, engine: FaultyEngine, old: int | None, new: int) -> tuple[Outcome, str]:
    """What the engine is, and in words what it holds."""
    label, paused = engine.weight_version, engine.paused
    dead = engine.down or bool(engine.lost())
    state = "old" if reader.holds(old) else "new" if reader.holds(new) else "torn"
    held = "dead" if dead else "held" if paused else "serving"
    words = f"{state} weights, labelled {label}, {held}"
    if state == "torn":
        return ("fenced" if dead or paused else "mixed"), words
    if dead:
        return ("old" if state == "old" else "new"), words
    if paused:
        return "fenced", words
    expected = str(new) if state == "new" else "default" if old is None else str(old)
    if label != expected:
        return "mixed", words
    return ("old" if state == "old" else "new"), words


_ACCUSED = (
    r"rank \d+ \((\w+ rank \d+)\) failed in phase",
    r"(\w+ rank \d+) failed in phase",
    r"rank \d+ \((\w+ rank \d+)\): ",
    # Nobody can know which of its ends cut a connection: both are named.
    r"the connection broke \(rank \d+ \((\w+ rank \d+)\) was",
    r"^\s*(?:- )?(?:engine [^:]+:\d+: )?(\w+ rank \d+): ",
    r"no answer from ((?:rank \d+ \(\w+ rank \d+\)(?:, )?)+)",
    r"no answer from ((?:\w+ rank \d+(?:, )?)+)",
    r"of rank \d+ \((\w+ rank \d+)\)",
    r"(trainer rank \d+) (?:did not say|is gone|did not)",
    r"from rank \d+ \((\w+ rank \d+)\)(?: to|: )",
    r"from (\w+ rank \d+): ",
    r"to rank \d+ \((\w+ rank \d+)\)",
)
_ENGINE = (
    r"engine {name} (?:did not answer|answered|broke off|cannot be reached|could not|is not healthy"
    r"|is still busy)"
)
_BOARD = r"the control board|closed the control board"


def accused(text: str, engine: str) -> set[str]:
    """Who is named as the culprit by an error's text."""
    found: set[str] = set()
    for pattern in _ACCUSED:
        for match in re.findall(pattern, text, re.MULTILINE):
            found |= set(re.findall(r"(?:trainer|engine) rank \d+", match))
    if re.search(_ENGINE.format(name=re.escape(engine)), text):
        found.add("engine")
    if re.search(_BOARD, text):
        found.add("trainer rank 0")
    return found


def named(case: Case, texts: list[str], engine: str) -> bool:
    """Whether each error names the victim.

    Of an engine the ranks are known to its own server alone: what strikes in a control call may be
    named by the call. A whole engine may be named by any of its ranks.
    """
    for text in texts:
        found = accused(text, engine)
        wanted: set[str] = {case.victim}
        if case.victim.startswith("engine"):
            wanted.add("engine")
        if case.victim == "engine":
            wanted |= {"engine rank 0", "engine rank 1"}
        if not found & wanted:
            return False
    return True
