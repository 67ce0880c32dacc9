import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard_trainer.names import WRAPPERS, canonical_names, strip_wrappers

_PART = st.sampled_from(["layers", "0", "mlp", "q_proj", "weight", "bias"])


@given(st.lists(_PART, min_size=1, max_size=5), st.data())
def test_wrappers_are_stripped_at_any_depth(path: list[str], data: st.DataObject) -> None:
    wrapped: list[str] = []
    for part in path:
        wrapped += data.draw(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3))
        wrapped.append(part)

    assert strip_wrappers(".".join(wrapped)) == ".".join(path)


@pytest.mark.parametrize("name", ["module_list.0.weight", "my_orig_mod.weight", "x.module"])
def test_only_whole_components_that_lead_to_a_tensor_are_wrappers(name: str) -> None:
    assert strip_wrappers(name) == name


def test_order_is_canonical_whatever_the_wrappers() -> None:
    names = canonical_names(["z._orig_mod.a", "module.b", "_orig_mod.a"])

    assert list(names.values()) == ["a", "b", "z.a"]


def test_names_that_become_equal_are_all_listed() -> None:
    with pytest.raises(LayoutError) as caught:
        canonical_names(["a.w", "module.a.w", "b", "c.x", "c._orig_mod.x"])

    assert caught.value.faults == ("a.w: a.w, module.a.w", "c.x: c._orig_mod.x, c.x")
    assert "pass `rename`" in str(caught.value)


def test_a_rename_replaces_the_rule() -> None:
    names = canonical_names(["module.w"], lambda name: f"model.{name}")

    assert names == {"module.w": "model.module.w"}
