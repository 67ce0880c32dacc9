"""Alignment: which box of a canonical tensor corresponds to which view of local storage."""

from reshard.layout.align.compose import Correspondence, Holdings
from reshard.layout.align.elements import align_elements
from reshard.layout.align.views import Aligned, align

__all__ = ["Aligned", "Correspondence", "Holdings", "align", "align_elements"]
