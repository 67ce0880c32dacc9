"""Removing old versions: the manifest first, so that none is ever seen half removed."""

import contextlib
import shutil
from pathlib import Path

from reshard.store.errors import StoreError
from reshard.store.files import sync_folder
from reshard.store.manifest import MANIFEST


def sealed_versions(root: Path) -> tuple[int, ...]:
    """The versions that can be read, ascending."""
    return tuple(
        sorted(int(file.parent.name.removeprefix("v")) for file in root.glob(f"v*/{MANIFEST}"))
    )


def retire(root: Path, keep: int) -> tuple[int, ...]:
    """Remove all sealed versions but the newest `keep`, and half written ones older than those.

    Returns:
        The versions that were removed.

    Raises:
        StoreError: `keep` is less than 1.
    """
    if keep < 1:
        raise StoreError(f"keep={keep}: the newest version always stays")
    kept = sealed_versions(root)[-keep:]
    removed = []
    for folder in sorted(root.glob("v*")):
        version = int(folder.name.removeprefix("v"))
        if not kept or version >= kept[0]:
            continue
        with contextlib.suppress(FileNotFoundError):
            (folder / MANIFEST).unlink()
        sync_folder(folder)
        shutil.rmtree(folder)
        removed.append(version)
    return tuple(removed)
