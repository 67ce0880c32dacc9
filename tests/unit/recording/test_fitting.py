"""Padding of the vocabulary and names of tied embeddings; everything else is left to the loader."""

import pytest

from reshard.session import TensorSpec
from reshard_vllm.install.fitting import Vocabulary, fit

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER = TensorSpec("model.norm.weight", (32,), "float32")


def spec(name: str, rows: int = 101) -> TensorSpec:
    return TensorSpec(name, (rows, 32), "float32")


TIED = Vocabulary({EMBED: (101, 32)}, {}, tied=True)
"""The configuration ties, the checkpoint has the embedding alone."""
BY_VALUE = Vocabulary({EMBED: (101, 32), HEAD: (101, 32)}, {HEAD: EMBED}, tied=False)
"""The checkpoint has both, equal: vLLM ties after loading."""
UNTIED = Vocabulary({EMBED: (101, 32), HEAD: (101, 32)}, {}, tied=False)


@pytest.mark.parametrize("vocabulary", [TIED, BY_VALUE])
@pytest.mark.parametrize("rows", [101, 104])
def test_the_output_stands_in_for_a_tied_embedding(vocabulary: Vocabulary, rows: int) -> None:
    known = {*vocabulary.shapes, OTHER.name}
    fitted = fit((OTHER, spec(HEAD, rows)), known, vocabulary)
    assert dict(fitted.names) == {EMBED: HEAD}
    given = {s.name: s.shape for s in fitted.specs}
    assert given[EMBED] == (101, 32)
    assert (HEAD in given) == (HEAD in known)
    assert any(EMBED in note for note in fitted.notes)


@pytest.mark.parametrize("vocabulary", [TIED, BY_VALUE, UNTIED])
@pytest.mark.parametrize("sent", [(EMBED,), (EMBED, HEAD)])
def test_what_is_sent_under_its_own_name_is_left_alone(
    vocabulary: Vocabulary, sent: tuple[str, ...]
) -> None:
    specs = (OTHER, *map(spec, sent))
    fitted = fit(specs, {*vocabulary.shapes, OTHER.name}, vocabulary)
    assert fitted.specs == specs
    assert not fitted.names
    assert not fitted.notes


def test_an_untied_embedding_has_no_stand_in() -> None:
    fitted = fit((OTHER, spec(HEAD)), {EMBED, HEAD, OTHER.name}, UNTIED)
    assert not fitted.names


@pytest.mark.parametrize("rows", [102, 100, 101 + 8192 + 3])
def test_other_row_counts_are_no_padding(rows: int) -> None:
    """Not a multiple of 8, fewer, thousands more: another vocabulary, which the loader refuses."""
    fitted = fit((spec(EMBED, rows), spec(HEAD)), {EMBED, HEAD}, UNTIED)
    assert fitted.specs[0].shape == (rows, 32)


def test_other_tensors_are_never_cut() -> None:
    longer = TensorSpec(OTHER.name, (40,), "float32")
    assert fit((longer, spec(EMBED, 104)), {EMBED, OTHER.name}, TIED).specs[0] == longer
