"""Exchanges between real processes: exact on random uneven layouts."""

import itertools

import pytest
from tests.multiprocess.transport.ranks import run_ranks
from tests.multiprocess.transport.workers import refit_worlds

from reshard.board import BoardServer

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("kind", ["windows", "rounds", "snapshot", "live", "mixed"])
@pytest.mark.parametrize(
    ("trainers", "engines"), [(1, 1), (1, 4), (2, 2), (2, 3), (3, 2), (4, 1), (4, 4)]
)
def test_random_worlds_arrive_exactly(trainers: int, engines: int, kind: str) -> None:
    seeds = range(trainers * 100 + engines * 10, trainers * 100 + engines * 10 + 9)
    with BoardServer() as server:
        arguments = [
            (server.invitation, "engine/e1", rank, trainers, engines, seeds, kind)
            for rank in range(trainers + engines)
        ]
        wrong = list(itertools.chain(*run_ranks(refit_worlds, arguments)))
    assert not wrong
