"""Shard manifests: what one trainer publishes for one policy version.

A manifest is a value; each state is a new value. Static facts (names, shapes, pieces) travel once
a layout and are named here by their digest, so a step's manifest stays small.

Not here: who writes or reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from reshard.errors import ReshardError
from reshard.ids import PolicyVersion


class ManifestState(StrEnum):
    """Where a version is on its way."""

    DRAFT = "draft"
    """Weights exist on the trainer's ranks; nothing is agreed."""
    SEALED = "sealed"
    """Every trainer rank has described its part, and all agree on shapes and dtypes."""
    PUBLISHED = "published"
    """Engines serve it."""
    RETIRED = "retired"
    """A later version took its place."""


@dataclass(frozen=True, slots=True)
class ShardManifest:
    """One policy version of one run.

    Attributes:
        run_id: the training run.
        version: number of optimizer steps that made it.
        base: the version that a receiver must hold already; None: none, as all bytes travel.
        state: see `ManifestState`.
        layout_digest: of all trainer ranks' layouts; empty in a draft.
        plan_digests: by engine: of the plan that brought the bytes; empty until published.
    """

    run_id: str
    version: PolicyVersion
    base: PolicyVersion | None = None
    state: ManifestState = ManifestState.DRAFT
    layout_digest: str = ""
    plan_digests: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.version < 0:
            faults.append(f"version {self.version} is negative")
        if self.base is not None and self.base >= self.version:
            faults.append(f"base {self.base} is not before version {self.version}")
        if (self.state is ManifestState.DRAFT) == bool(self.layout_digest):
            faults.append(f"{self.state} with layout digest {self.layout_digest!r}")
        if faults:
            raise ReshardError("not a manifest", faults)

    def seal(self, layout_digest: str) -> "ShardManifest":
        """All trainer ranks have agreed on this layout.

        >>> draft = ShardManifest("run", PolicyVersion(7))
        >>> draft.seal("ab12").state
        <ManifestState.SEALED: 'sealed'>
        """
        self._must_be(ManifestState.DRAFT)
        return replace(self, state=ManifestState.SEALED, layout_digest=layout_digest)

    def publish(self, plan_digests: Mapping[str, str]) -> "ShardManifest":
        """These engines serve it."""
        self._must_be(ManifestState.SEALED)
        return replace(self, state=ManifestState.PUBLISHED, plan_digests=dict(plan_digests))

    def retire(self) -> "ShardManifest":
        """A later version took its place."""
        self._must_be(ManifestState.PUBLISHED)
        return replace(self, state=ManifestState.RETIRED)

    def _must_be(self, state: ManifestState) -> None:
        if self.state is not state:
            raise ReshardError(
                f"version {self.version} of run {self.run_id} is {self.state}, not {state}"
            )
