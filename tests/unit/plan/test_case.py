"""Planning cases as JSON: what is read, and every fault of what is not."""

import contextlib
import json
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.plan.oracles import assert_covers
from tests.unit.plan.worlds import Case as World
from tests.unit.plan.worlds import cases

from reshard.errors import PlanError
from reshard.layout.sharding import FlatShard, Mesh, Replicate, Shard, Sharding, StridedShard
from reshard.plan.case import Case, read_case

Json = dict[str, object]

SIDE: Final[Json] = {"mesh": [2], "ranks": [0, 1], "placements": ["S0"]}


def side(**changes: object) -> Json:
    return {**SIDE, **changes}


def tensor(**changes: object) -> Json:
    plain = {"name": "w", "shape": [8, 8], "dtype": "float32", "source": SIDE, "destination": SIDE}
    return {**plain, **changes}


def read(*tensors: object) -> Case:
    return read_case(json.dumps({"tensors": tensors}).encode())


def faults(*tensors: object) -> tuple[str, ...]:
    return faults_of(json.dumps({"tensors": tensors}).encode())


def faults_of(raw: bytes) -> tuple[str, ...]:
    with pytest.raises(PlanError, match="this is not a planning case") as caught:
        read_case(raw)
    return caught.value.faults


def as_entry(sharding: Sharding) -> Json:
    return {
        "mesh": sharding.mesh.shape,
        "ranks": sharding.mesh.ranks,
        "placements": [str(placement) for placement in sharding.placements],
    }


@given(cases())
def test_a_case_that_is_read_is_planned(world: World) -> None:
    case = read(
        *(
            tensor(name=name, shape=s.shape, source=as_entry(s), destination=as_entry(d))
            for name, (s, d) in world.items()
        )
    )
    assert {t.name: (t.source, t.destination) for t in case.tensors} == world
    plan = case.plan()
    assert_covers(plan, world)
    assert plan.redundancy == 1.0


def test_every_placement_and_dtype_is_read() -> None:
    case = read(
        tensor(
            source={"mesh": [2, 1], "ranks": [5, 3], "placements": ["SS0/3", "S1"]},
            destination=side(dtype="torch.bfloat16"),
        )
    )
    (read_tensor,) = case.tensors
    assert read_tensor.source == Sharding(
        Mesh((2, 1), (5, 3)), (StridedShard(0, 3), Shard(1)), (8, 8)
    )
    assert (read_tensor.source_dtype, read_tensor.wire_dtype) == ("float32", "bfloat16")
    assert case.source_ranks == (3, 5)
    assert case.destination_ranks == (0, 1)
    for text, placement in (("R", Replicate()), ("F", FlatShard())):
        assert read(tensor(source=side(placements=[text]))).tensors[0].source.placements == (
            placement,
        )


def test_no_tensors() -> None:
    assert read().plan().ops == ()


def test_all_faults_of_a_file_are_listed() -> None:
    assert faults(
        tensor(dtype="float33"),
        tensor(name="v", source=side(placements=["S2"]), destination=side(placements=["Q"])),
        tensor(name="u", source=side(ranks=[0, 1, 1]), destination=side(ranks=[4])),
        tensor(name="t", source=side(placements=["P"]), destination=side(placements=[])),
    ) == (
        "w: dtype: unknown dtype 'float33'; known: float64, float32, float16, bfloat16, "
        "float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, float8_e8m0fnu, "
        "float4_e2m1fn_x2, int64, int32, int16, int8, uint8, uint16, uint32, uint64, bool, "
        "complex64",
        "v: source: placement S2 shards dim 2 of a 2-d tensor",
        "v: destination: unknown placement 'Q'; expected R, S<dim>, SS<dim>/<split_factor> or F",
        "u: source: 3 ranks do not fill mesh (2,) of 2",
        "u: source: ranks [1] are repeated",
        "u: destination: 1 ranks do not fill mesh (2,) of 2",
        "t: source: placement 'P': each rank holds a partial sum, not elements of the tensor; "
        "redistribute it to a shard or a replica first",
        "t: destination: 0 placements for a mesh of 1 axes",
    )


def test_no_fault_hides_another() -> None:
    assert faults(
        tensor(
            shape=[8, -1],
            source=side(mesh=[1, 2], placements=["Q", "SS0/0"]),
            destination=side(ranks=[-1, 0], placements=["S0", "S1"]),
        ),
        tensor(name="v", destination=side(placements=["Q", "S2"])),
    ) == (
        "w: shape: expected a list of integers from 0 to 281474976710655, not [8, -1]",
        "w: source: unknown placement 'Q'; expected R, S<dim>, SS<dim>/<split_factor> or F",
        "w: source: placement SS0/0 has split factor 0",
        "w: destination: ranks: expected a list of integers from 0 to 1048575, not [-1, 0]",
        "w: destination: 2 placements for a mesh of 1 axes",
        "v: destination: unknown placement 'Q'; expected R, S<dim>, SS<dim>/<split_factor> or F",
        "v: destination: 2 placements for a mesh of 1 axes",
        "v: destination: placement S2 shards dim 2 of a 2-d tensor",
    )


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (tensor(source=side(ranks=[0, 0])), "w: source: ranks [0] are repeated"),
        (
            tensor(source=side(placements=["SS0/0"])),
            "w: source: placement SS0/0 has split factor 0",
        ),
        (
            tensor(source=side(mesh=[2, 1], placements=["F", "S0"])),
            "w: source: a flat shard cannot be combined with another shard",
        ),
        (
            tensor(source=side(ranks=[3], placements=["S9"])),
            "w: source: 1 ranks do not fill mesh (2,) of 2",
        ),
        (
            tensor(source=side(ranks=[3], placements=["S9"])),
            "w: source: placement S9 shards dim 9 of a 2-d tensor",
        ),
        (
            tensor(destination=side(shape=[8, 9])),
            "w: destination: shape (8, 9), but the tensor is of shape (8, 8)",
        ),
        (tensor(destination=side(dtype="int")), "w: destination: dtype: unknown dtype 'int'"),
        (tensor(destination=side(dtype=3)), "w: destination: dtype: expected a string, not 3"),
        (tensor(destination=side(dtpye="int8")), "w: destination: unknown field 'dtpye'; known"),
        (tensor(destination=[]), "w: destination: expected an object, not []"),
        (tensor(source=None), "tensors[0]: 'source' is missing"),
        (tensor(source={}), "w: source: 'mesh' is missing"),
        (tensor(source={}), "w: source: 'placements' is missing"),
        (tensor(source=side(mesh=[0])), "w: source: mesh (0,) has an empty axis"),
        (tensor(source=side(mesh=2)), "w: source: mesh: expected a list of integers from 0 to"),
        (tensor(source=side(ranks=[0, True])), "w: source: ranks: expected a list of integers"),
        (tensor(source=side(ranks=[0, -1])), "w: source: ranks: expected a list of integers"),
        (tensor(source=side(ranks=[0, 1.5])), "w: source: ranks: expected a list of integers"),
        (tensor(source=side(placements="S0")), 'w: source: placements: expected a list, not "S0"'),
        (tensor(source=side(placements=[0])), "w: source: placement 0: expected a string"),
        (tensor(shape=[8, "8"]), "w: shape: expected a list of integers from 0 to"),
        (tensor(name=["w"]), 'tensors[0]: name: expected a string, not ["w"]'),
        (tensor(comment="?"), "tensors[0]: unknown field 'comment'; known: name, shape, dtype"),
        ("w", 'tensors[0]: expected an object, not "w"'),
        (["x" * 99], 'tensors[0]: expected an object, not ["xxx'),
    ],
)
def test_each_fault_by_its_text(entry: object, fault: str) -> None:
    assert any(found.startswith(fault) for found in faults(entry)), faults(entry)


def test_a_tensor_described_twice() -> None:
    found = faults(tensor(), tensor(shape=[8, 9]))
    assert found == ("w: described 2 times; give each tensor once",)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b'{"tensors": [', "malformed JSON: Expecting value: line 1 column 14"),
        (b"", "malformed JSON: Expecting value: line 1 column 1"),
        (b"\xff\xfe", "not UTF-8: "),
        (b"[" * 100_000, "malformed JSON: nested too deeply"),
        (b'{"tensors": [' + b"9" * 5000 + b"]}", "malformed JSON: nested too deeply or a number"),
        (b'{"tensors": [], "tensors": []}', "malformed JSON: field 'tensors' is given twice"),
        (b"[]", "the case: expected an object, not []"),
        (b"{}", "the case: 'tensors' is missing"),
        (b'{"tensors": {}}', "tensors: expected a list, not {}"),
    ],
)
def test_what_is_no_case_at_all(raw: bytes, fault: str) -> None:
    assert faults_of(raw)[0].startswith(fault)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "shape", "dtype", "source", "mesh", "ranks", "placements", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_read_or_refused(value: object) -> None:
    documents = (
        value,
        {"tensors": value},
        {"tensors": [value]},
        {"tensors": [tensor(source=value)]},
    )
    for document in documents:
        # Whatever it is: no other exception, and no endless loop.
        with contextlib.suppress(PlanError):
            read_case(json.dumps(document).encode())


def test_a_cast_that_cannot_be_made_is_found_by_the_plan() -> None:
    case = read(tensor(dtype="int8", destination=side(dtype="bfloat16")))
    with pytest.raises(PlanError, match="w: int8 at the source cannot be cast to bfloat16"):
        case.plan()
