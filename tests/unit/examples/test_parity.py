"""The parts of the parity experiment: its task, its loss, and what it says of its runs."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from examples.grpo_tiny import make_policy
from examples.parity.document import table, verdict, write_document
from examples.parity.experiment import Engine, Experiment, Run
from examples.parity.figure import by_way, draw
from examples.parity.learner import MOST_WEIGHT, Learner, advantages, grpo_loss
from examples.parity.own_model import OwnModel
from examples.parity.sized import sized, workload
from examples.parity.task import LENGTH, NUMBERS, VOCAB, counting, counting_reward
from examples.parity.ways import colocated

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.rollout import Serial


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    folder = tmp_path_factory.mktemp("start")
    make_policy(folder, VOCAB)
    return Experiment(counting(), folder, (Engine("http://e:1", 2),), batch=3, samples=4, steps=3)


def test_the_reward_counts_steps_from_what_was_sampled() -> None:
    right = tuple((5 + 1 + n) % NUMBERS for n in range(LENGTH))
    assert counting_reward((5, NUMBERS), right) == 1.0
    assert counting_reward((5, NUMBERS), right[1:] + right[1:2]) == (LENGTH - 2) / LENGTH
    assert counting_reward((5, NUMBERS), (VOCAB - 1,) * LENGTH) == 0.0


def test_the_models_own_samples_bear_the_models_own_probabilities(experiment: Experiment) -> None:
    """The oracle is one forward over the whole text, without a cache."""
    learner = Learner.start(experiment.start, seed=1)
    asked = {Serial(n): prompt for n, prompt in enumerate(experiment.task.prompts[:3])}
    groups = OwnModel(learner, experiment, seed=2).generate(asked, PolicyVersion(7))
    assert [group.serial for group in groups] == [0, 1, 2]
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.versions() == (7,) * LENGTH
            text = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
            with torch.no_grad():
                scores = learner.model(text).logits[0, 1:-1].log_softmax(-1)
            expected = scores[range(LENGTH), list(rollout.tokens)]
            assert torch.allclose(torch.tensor(rollout.log_probs), expected, atol=1e-4)
    assert len({rollout.tokens for group in groups for rollout in group.rollouts}) == 12


def test_the_loss_of_fresh_rollouts_is_that_of_reinforce(experiment: Experiment) -> None:
    learner = Learner.start(experiment.start, seed=1)
    asked = {Serial(n): prompt for n, prompt in enumerate(experiment.task.prompts[:3])}
    groups = OwnModel(learner, experiment, seed=2).generate(asked, PolicyVersion(0))
    weighted = [
        value * sum(rollout.log_probs) / LENGTH
        for group in groups
        for value, rollout in zip(advantages(group), group.rollouts, strict=True)
    ]
    loss, gap = grpo_loss(learner.model, groups)
    assert gap < 1e-4
    assert loss.item() == pytest.approx(-sum(weighted) / len(weighted), abs=1e-4)
    assert MOST_WEIGHT > 1


def test_the_same_seed_gives_the_same_run(experiment: Experiment) -> None:
    seen: list[int] = []
    first = colocated(experiment, 3, lambda run: seen.append(len(run.rewards)))
    second = colocated(experiment, 3, lambda run: None)
    assert first.rewards == second.rewards
    assert seen == [1, 2, 3]
    assert first.staleness == {0: 9}


def runs() -> list[Run]:
    found = []
    for way, final, seconds in [
        ("co-located", 0.5, 1.0),
        ("sequential", 0.6, 4.0),
        ("asynchronous 4", 0.9, 2.0),
    ]:
        for seed in range(2):
            run = Run(way, seed, [0.1, final + seed / 10], seconds=[seconds / 2, seconds])
            run.staleness = Counter({1: 4})
            run.idle = {} if way == "co-located" else {"e:1": 0.25}
            found.append(run)
    return found


def test_the_table_and_the_verdict_say_what_the_runs_did() -> None:
    lines = table(runs()).splitlines()
    assert lines[2].startswith("| co-located | 0.55 (0.50 - 0.60) | 1.0 | 0% | 0% | - | 1.00 | 1 |")
    assert "| 25% |" in lines[3]
    told = verdict(runs()).splitlines()
    assert told == [
        "- sequential: the spread of its final rewards overlaps with that of co-located.",
        "- asynchronous 4: the spread of its final rewards is above that of co-located; "
        "2.00 times as fast as "
        "sequential.",
    ]


def test_page_and_figure_are_written(experiment: Experiment, tmp_path: Path) -> None:
    draw(runs(), tmp_path / "pictures/parity.png")
    write_document(runs(), experiment, tmp_path / "parity.md")
    assert (tmp_path / "pictures/parity.png").read_bytes().startswith(b"\x89PNG")
    assert table(runs()) in (tmp_path / "parity.md").read_text()


def test_sizing_foretells_from_the_sequential_runs(experiment: Experiment) -> None:
    """Steps of 2 s, of which the engines take 1.5 and the rest 0.5: beside each other, 1.5."""
    found = runs()
    for run in found:
        run.waited_seconds = 0.75 * run.wall_seconds
    asked = workload([run for run in found if run.way == "sequential"], experiment)
    assert asked.step_seconds == pytest.approx(0.5)
    assert asked.generation_seconds == pytest.approx(1.5)
    _, _, sequential, asynchronous = sized(by_way(found), experiment).splitlines()
    assert sequential.startswith("| sequential | 2.")
    assert asynchronous.startswith("| asynchronous 4 | 1.5")
    assert "| 1.00 s |" in asynchronous
