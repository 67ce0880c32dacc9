"""Ways to refit an engine, as phases of traffic: gather and broadcast, vLLM's M2N rule, pull, plan.

Each takes the same refit and the same machine, so that their times compare. Not here: the cost
model (`machine`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.dtypes import DType, itemsize
from reshard.errors import LayoutError
from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region
from reshard.layout.side import SideLayout
from reshard.plan import TransferPlan, make_plan
from reshard.simulation.machine import Machine
from reshard.simulation.models import Family, ModelShape
from reshard.simulation.parallelism import Parallelism, spread
from reshard.simulation.rules import Rule
from reshard.simulation.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a refit that begins when the one before it has ended.

    Attributes:
        name: what happens.
        wire_seconds: of its busiest resource.
        busiest: that resource.
        latency_seconds, copy_seconds, host_seconds: as `machine` says.
    """

    name: str
    wire_seconds: float
    busiest: str
    latency_seconds: float
    copy_seconds: float
    host_seconds: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.wire_seconds + self.latency_seconds + self.copy_seconds + self.host_seconds


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one method takes.

    Attributes:
        method: its name.
        phases: in order.
        received_bytes: by all engine ranks together.
        needed_bytes: by all engine ranks together.
    """

    method: str
    phases: tuple[Phase, ...]
    received_bytes: float
    needed_bytes: int

    @property
    def seconds(self) -> float:
        """The refit."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def redundancy(self) -> float:
        """Bytes received over bytes needed."""
        return self.received_bytes / self.needed_bytes if self.needed_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Refit:
    """Two sides of a refit.

    Attributes:
        sources, destinations: what ranks hold and need, in the dtypes that they hold and want.
        source_stages: trainer ranks by pipeline stage; tensors of a stage lie in it alone.
        families: which family each tensor belongs to; empty where that is not known.
    """

    sources: SideLayout
    destinations: SideLayout
    source_stages: tuple[tuple[int, ...], ...]
    families: Mapping[FQN, Family]

    @property
    def engine_ranks(self) -> tuple[int, ...]:
        """All ranks that need something."""
        ranks = {rank for group in self.destinations.groups for rank, _ in group.by_rank}
        return tuple(sorted(ranks))

    @property
    def ranks(self) -> int:
        """One more than the last rank."""
        return max((*self.engine_ranks, *(r for stage in self.source_stages for r in stage))) + 1

    def needs(self) -> dict[int, int]:
        """Bytes that each engine rank needs."""
        found: dict[int, int] = defaultdict(int)
        for group in self.destinations.groups:
            size = itemsize(group.dtype) * len(group.names)
            for rank, regions in group.by_rank:
                found[rank] += size * sum(region.volume for region in regions)
        return found

    def wire_bytes(self) -> dict[FQN, int]:
        """Size of each whole tensor as it travels."""
        return {
            name: prod(group.shape) * itemsize(group.dtype)
            for group in self.destinations.groups
            for name in group.names
        }

    def only(self, chosen: Callable[[FQN], bool]) -> "Refit":
        """The same refit of some tensors."""
        return Refit(
            _only(self.sources, chosen),
            _only(self.destinations, chosen),
            self.source_stages,
            self.families,
        )


def _only(side: SideLayout, chosen: Callable[[FQN], bool]) -> SideLayout:
    kept = []
    for group in side.groups:
        names = tuple(name for name in group.names if chosen(name))
        if names:
            kept.append(type(group)(names, group.shape, group.dtype, group.by_rank))
    return SideLayout(tuple(kept))


def of_model(
    model: ModelShape, trainer: Parallelism, engine: Parallelism, held: DType, wire: DType
) -> Refit:
    """The refit of a model, trainer ranks first."""
    stages = tuple(
        tuple(range(stage * trainer.stage, (stage + 1) * trainer.stage))
        for stage in range(trainer.pp)
    )
    families = {
        name: family
        for family in model.families
        for name in family.names(family.layers, range(family.experts))
    }
    return Refit(
        spread(model, trainer, 0, held),
        spread(model, engine, trainer.ranks, wire),
        stages,
        families,
    )


Pairs = Mapping[tuple[int, int], int]
"""Bytes from one rank to another."""


def pairs_of(plan: TransferPlan) -> Pairs:
    """What a plan moves; what ranks keep is left out."""
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for op in plan.ops:
        if not op.stays:
            nbytes = plan.bytes_each(op)
            for destination in op.destinations:
                pairs[op.source, destination] += nbytes
    return pairs


def reshard(refit: Refit, machine: Machine) -> Prediction:
    """Our plan: every rank receives what it needs, once."""
    plan = make_plan(refit.sources, refit.destinations)
    return planned(pairs_of(plan), machine, plan.kept_bytes)


def planned(pairs: Pairs, machine: Machine, kept: int = 0) -> Prediction:
    """The transfers of a plan; all are packed and unpacked."""
    traffic = _sent(pairs, machine)
    moved = sum(pairs.values())
    return Prediction("reshard", (_phase("transfer", traffic),), moved + kept, moved + kept)


def pull(refit: Refit, machine: Machine) -> Prediction:
    """Trainer ranks gather their stage's full tensors, engine ranks then get what they need.

    What pull and point-to-point writes of full tensors do: any rank of a stage can send any part.
    """
    return _pulled("gather, then pull", refit, machine, _stage_of(refit))


def push(refit: Refit, machine: Machine) -> Prediction:
    """The ranks that hold a tensor's shards gather it, and any of them sends any part.

    What `full_tensor()` on each tensor's own mesh, and writes from all ranks of it, do.
    """
    holders = {
        group.names[0]: tuple(rank for rank, _ in group.by_rank) for group in refit.sources.groups
    }
    return _pulled("full tensors by mesh, then push", refit, machine, holders)


def _pulled(
    name: str, refit: Refit, machine: Machine, groups: Mapping[FQN, tuple[int, ...]]
) -> Prediction:
    """Gather each tensor over a group of ranks (by its group's first name), then send parts."""
    wanted = {name for group in refit.destinations.groups for name in group.names}
    nbytes: dict[tuple[int, ...], int] = defaultdict(int)
    whole = []
    for group in refit.sources.groups:
        ranks = groups[group.names[0]]
        count = sum(name in wanted for name in group.names)
        nbytes[ranks] += prod(group.shape) * itemsize(group.dtype) * count
        all_of_it = (Region.whole(group.shape),)
        held = tuple((GroupRank(rank), all_of_it) for rank in ranks)
        whole.append(type(group)(group.names, group.shape, group.dtype, held))
    gathering = Traffic(machine)
    for ranks, total in nbytes.items():
        gathering.share(ranks, total)
        for rank in ranks:
            gathering.copy(rank, total)
    pairs = pairs_of(make_plan(SideLayout(tuple(whole)), refit.destinations))
    phases = (_phase("gather", gathering), _phase("transfer", _sent(pairs, machine)))
    needed = sum(refit.needs().values())
    return Prediction(name, phases, float(needed), needed)


def _stage_of(refit: Refit) -> dict[FQN, tuple[int, ...]]:
    """The trainer ranks of the stage in which each group of tensors lies, by first name."""
    stages = {rank: ranks for ranks in refit.source_stages for rank in ranks}
    return {group.names[0]: stages[group.by_rank[0][0]] for group in refit.sources.groups}


def broadcast_one(refit: Refit, machine: Machine) -> Prediction:
    """Trainer rank 0 gathers every full tensor and broadcasts it; loaders cut it."""
    root = refit.source_stages[0][0]
    return _broadcast("gather, rank 0 broadcasts", refit, machine, [root], _by_stage(refit))


def broadcast_stages(refit: Refit, machine: Machine) -> Prediction:
    """The first rank of each pipeline stage gathers and broadcasts the stage's tensors."""
    roots = [stage[0] for stage in refit.source_stages]
    return _broadcast("gather, stages broadcast", refit, machine, roots, _by_stage(refit))


def broadcast_all(refit: Refit, machine: Machine) -> Prediction:
    """Every trainer rank gathers and broadcasts an equal part."""
    roots = [rank for stage in refit.source_stages for rank in stage]
    return _broadcast("gather, all ranks broadcast", refit, machine, roots, _by_stage(refit))


def by_rule(refit: Refit, machine: Machine, rule: Rule) -> Prediction:
    """Tensors that a rule lets through go shard to shard, all others as rank 0's broadcast."""
    if not refit.families:
        raise LayoutError(f"{rule.name}: which module takes a tensor is known of models alone")
    direct = rule.direct(refit.families, _cuts(refit))
    straight = refit.only(lambda name: name in direct)
    rest = refit.only(lambda name: name not in direct)
    first = reshard(straight, machine)
    second = broadcast_one(rest, machine)
    return Prediction(
        rule.name,
        (*first.phases, *second.phases),
        first.received_bytes + second.received_bytes,
        sum(refit.needs().values()),
    )


def direct_share(refit: Refit, rule: Rule) -> float:
    """Of all bytes of the model, how many go directly by a rule."""
    direct = rule.direct(refit.families, _cuts(refit))
    sizes = refit.wire_bytes()
    return sum(sizes[name] for name in direct) / sum(sizes.values())


def _cuts(refit: Refit) -> int:
    """Into how many shards the engine cuts at most: its tensor parallelism."""
    return max(
        (len({regions for _, regions in group.by_rank}) for group in refit.destinations.groups),
        default=1,
    )


def _sent(pairs: Pairs, machine: Machine) -> Traffic:
    traffic = Traffic(machine)
    for (source, destination), nbytes in pairs.items():
        traffic.send(source, destination, nbytes)
        traffic.copy(source, nbytes)
        traffic.copy(destination, nbytes)
    return traffic


def _phase(name: str, traffic: Traffic, host_seconds: float = 0.0) -> Phase:
    wire, busiest = traffic.busiest
    return Phase(name, wire, busiest, traffic.latency, traffic.copies, host_seconds)


Stages = Mapping[int, tuple[tuple[int, ...], int]]
"""By stage: its ranks, and the bytes of its full tensors as the trainer holds them."""


def _by_stage(refit: Refit) -> Stages:
    stage_of = {rank: s for s, ranks in enumerate(refit.source_stages) for rank in ranks}
    wanted = {name for group in refit.destinations.groups for name in group.names}
    nbytes: dict[int, int] = defaultdict(int)
    for group in refit.sources.groups:
        count = sum(name in wanted for name in group.names)
        size = prod(group.shape) * itemsize(group.dtype) * count
        nbytes[stage_of[group.by_rank[0][0]]] += size
    return {s: (refit.source_stages[s], total) for s, total in sorted(nbytes.items())}


def _broadcast(
    name: str, refit: Refit, machine: Machine, roots: Sequence[int], stages: Stages
) -> Prediction:
    """Roots gather what they lack, broadcast equal parts of what they have; loaders do the rest."""
    ranks = refit.engine_ranks
    sizes = refit.wire_bytes()
    total = sum(sizes.values())
    held = sum(nbytes for _, nbytes in stages.values())
    gathering, sending = Traffic(machine), Traffic(machine)
    for holders, nbytes in stages.values():
        # Roots of the stage gather it; a single root gathers all stages.
        own = [root for root in roots if root in set(holders)] if len(roots) > 1 else roots
        for root in own:
            part = nbytes / len(own)
            for holder in holders:
                gathering.send(holder, root, part / len(holders))
            gathering.copy(root, part)
            if ranks:
                sending.broadcast(root, ranks, part * total / held if held else 0.0)
    for rank, nbytes in refit.needs().items():
        sending.copy(rank, nbytes)
    loading = len(sizes) * machine.loader_us * 1e-6
    phases = (_phase("gather", gathering), _phase("broadcast and load", sending, loading))
    return Prediction(name, phases, float(total * len(ranks)), sum(refit.needs().values()))


def compare(refit: Refit, machine: Machine, rules: Sequence[Rule]) -> Iterator[Prediction]:
    """All methods; rules where it is known which module takes a tensor."""
    yield broadcast_one(refit, machine)
    if len(refit.source_stages) > 1:
        yield broadcast_stages(refit, machine)
    yield broadcast_all(refit, machine)
    if refit.families:
        for rule in rules:
            yield by_rule(refit, machine, rule)
    yield pull(refit, machine)
    yield reshard(refit, machine)
