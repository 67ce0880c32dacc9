"""A writer that is killed at any moment leaves whole versions, and they are the right ones."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.multiprocess.store.writer import SHAPE, values

from reshard.ids import FQN
from reshard.layout.region import Region
from reshard.store import StoreReader, VersionGone, VersionUnsealed
from reshard.store.retire import sealed_versions

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("seed", range(6))
def test_kill_nine_while_it_writes_leaves_the_older_version_readable(
    tmp_path: Path, seed: int
) -> None:
    command = [sys.executable, "-m", "tests.multiprocess.store.writer", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        begun = 0
        while begun < 3:
            begun = int(writer.stdout.readline())
        time.sleep(random.Random(seed).uniform(0.0, 0.06))
        writer.kill()
        begun = max([begun, *map(int, writer.stdout.read().split())])

    sealed = sealed_versions(tmp_path)
    assert sealed
    assert sealed[-1] in (begun - 1, begun)
    for version in sealed:
        whole = StoreReader(tmp_path, version, run_id="run").read(FQN("w"), Region.whole(SHAPE))
        assert torch.equal(whole, values(version))
    if sealed[-1] < begun:
        with pytest.raises((VersionUnsealed, VersionGone)):
            StoreReader(tmp_path, begun)
