"""The oracle of the engine tests can fail: another checkpoint shows in each of its parts."""

import pytest
from tests.support.engine_pool import A, B, EnginePool


@pytest.mark.engine("llama", 2)
def test_other_weights_show_in_every_part_of_a_fingerprint(engines: EnginePool) -> None:
    shared = engines.shared(engines.spec("llama", 2))
    started_on = engines.cold_fingerprint(engines.spec("llama", 2, seed=A))
    other = engines.cold_fingerprint(engines.spec("llama", 2, seed=B))
    assert started_on.checksums.keys() == other.checksums.keys() == shared.checksums().keys()
    assert started_on.checksums != other.checksums
    for prompt in range(len(started_on.tokens)):
        assert started_on.tokens[prompt] != other.tokens[prompt]
        ours, theirs = started_on.log_probabilities[prompt], other.log_probabilities[prompt]
        assert all(a != b for a, b in zip(ours, theirs, strict=True))
