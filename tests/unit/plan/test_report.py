"""Plans as a table and as plain values."""

from tests.unit.plan.test_case import read, side, tensor

from reshard.plan.report import as_json, as_text

ROWS_TO_COLUMNS = tensor(
    destination={
        "mesh": [4],
        "ranks": [2, 3, 4, 5],
        "placements": ["S1"],
        "dtype": "bfloat16",
    }
)


def test_the_table() -> None:
    case = read(ROWS_TO_COLUMNS)
    assert as_text(case, case.plan()) == TABLE.format(digest=case.plan().digest)


TABLE = """\
w  [8, 8]  float32 -> bfloat16
  source       mesh 2, ranks 0-1, S0
  destination  mesh 4, ranks 2-5, S1
      0 -> 2            16 B  [0:4, 0:2]
      0 -> 3            16 B  [0:4, 2:4]
      0 -> 4            16 B  [0:4, 4:6]
      0 -> 5            16 B  [0:4, 6:8]
      1 -> 2            16 B  [4:8, 0:2]
      1 -> 3            16 B  [4:8, 2:4]
      1 -> 4            16 B  [4:8, 4:6]
      1 -> 5            16 B  [4:8, 6:8]

  rank        sends     receives
     0         64 B            -
     1         64 B            -
     2            -         32 B
     3            -         32 B
     4            -         32 B
     5            -         32 B

moved              128 B, and 0 B kept in place
redundancy         1.000 (bytes received / bytes needed)
busiest receiver   32 B, 1.000 x the least possible
busiest sender     64 B, 1.000 x the least possible
digest             {digest}"""


def test_the_values() -> None:
    case = read(ROWS_TO_COLUMNS)
    values = as_json(case, case.plan())
    transfers = values["transfers"]
    assert isinstance(transfers, list)
    assert {**values, "transfers": transfers[:2]} == {
        "digest": case.plan().digest,
        "redundancy": 1.0,
        "received_bytes": {"2": 32, "3": 32, "4": 32, "5": 32},
        "sent_bytes": {"0": 64, "1": 64},
        "bounds": {"max_received_bytes": 32, "max_sent_bytes": 64},
        "transfers": [
            {
                "tensor": "w",
                "source_rank": 0,
                "destination_rank": 2,
                "bytes": 16,
                "regions": [{"offset": [0, 0], "shape": [4, 2]}],
            },
            {
                "tensor": "w",
                "source_rank": 0,
                "destination_rank": 3,
                "bytes": 16,
                "regions": [{"offset": [0, 2], "shape": [4, 2]}],
            },
        ],
    }
    assert len(transfers) == 8


def test_a_rank_on_both_sides_neither_sends_nor_receives_its_own() -> None:
    case = read(tensor(destination=side(placements=["S1"])))
    values = as_json(case, case.plan())
    assert values["received_bytes"] == values["sent_bytes"] == {"0": 64, "1": 64}
    assert "    0 keeps           64 B  [0:4, 0:4]" in as_text(case, case.plan())


def test_nothing_moves() -> None:
    case = read(tensor())
    values = as_json(case, case.plan())
    assert values["received_bytes"] == values["sent_bytes"] == {"0": 0, "1": 0}
    assert values["redundancy"] == 1.0
    assert "busiest sender     0 B, nothing to move" in as_text(case, case.plan())


def test_a_long_table_is_cut_short() -> None:
    replicas = {"mesh": [40], "ranks": list(range(10, 50)), "placements": ["R"]}
    flat = {"mesh": [8], "ranks": list(range(8)), "placements": ["F"]}
    case = read(tensor(shape=[8, 64, 3], source=flat, destination=replicas))
    text = as_text(case, case.plan())
    assert "  ... the first 200 transfers: --json lists all, --html draws them" in text
    assert text.count("->") == 200
    values = as_json(case, case.plan())["transfers"]
    assert isinstance(values, list)
    assert len(values) == 320


def test_many_regions_of_a_transfer_are_cut_short() -> None:
    strided = {"mesh": [2], "ranks": [0, 1], "placements": ["SS0/8"]}
    whole = {"mesh": [1], "ranks": [20], "placements": ["R"]}
    case = read(tensor(shape=[64], source=strided, destination=whole))
    assert "[0:4] [8:12] [16:20] [24:28] and " in as_text(case, case.plan())
