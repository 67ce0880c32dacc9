"""Some thousand inputs into every decoder. A hundred thousand: `make fuzz`."""

import msgspec
import pytest
from tests.faults.fuzz import CONTROL, STORED, WIRE, Fuzz, fuzz


def test_decoders_answer_or_refuse() -> None:
    counts = fuzz(3_000)
    assert len(counts.tried) == len(WIRE) + len(CONTROL) + len(STORED)
    assert all(counts.accepted[name] for name in counts.tried), counts.accepted


def test_a_decoder_that_crashes_is_seen() -> None:
    class Fragile(msgspec.Struct):
        number: int

        def __post_init__(self) -> None:
            if self.number == 3:
                raise KeyError("not foreseen")

    with pytest.raises(KeyError):
        Fuzz().wire(Fragile, msgspec.msgpack.encode({"number": 3}))
