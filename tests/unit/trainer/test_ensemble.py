import pytest

from reshard.board import Deadline
from reshard.errors import LayoutError
from reshard.ids import TrainerRank
from reshard_trainer.ensemble import Ensemble, GlobalRank


def test_without_torch_distributed_this_process_is_the_trainer() -> None:
    alone = Ensemble.current()

    assert (alone.rank, alone.size, alone.global_ranks) == (0, 1, (0,))
    assert alone.broadcast(b"secret", Deadline.after(1)) == b"secret"


def test_global_ranks_become_trainer_ranks() -> None:
    second_half = Ensemble(TrainerRank(1), (GlobalRank(6), GlobalRank(4), GlobalRank(5)))

    assert second_half.trainer_ranks([4, 5, 6, 4]) == (1, 2, 0, 1)


def test_a_mesh_beyond_the_ensemble_is_refused() -> None:
    alone = Ensemble(TrainerRank(0), (GlobalRank(0),))

    with pytest.raises(LayoutError, match=r"global ranks \[1, 2\] hold a part of the policy"):
        alone.trainer_ranks([0, 1, 2])
