"""What the project promises of its shape: imports, packages, lint rules that hold."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import succeed

ROOT = Path(__file__).parent.parent


def test_kprep_loads_neither_torch_nor_triton() -> None:
    code = "import prep.cli, sys; sys.exit(bool({'torch', 'triton'} & {name.split('.')[0] for name in sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_wheel_exposes_exactly_the_four_packages(tmp_path: Path) -> None:
    # Built from a copy: what an earlier build left behind in the tree would end in the wheel.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "data", "demo-out", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"manifests", "layout", "prep", "runtime"}
    assert {
        "manifests/geometries/k3.1.yaml",
        "manifests/example.yaml",
        "runtime/kernels/kda.py",
        "runtime/serving/pages/status.html",
        "layout/read_pool.c",
    } <= set(names)
    sources = {str(p.relative_to(ROOT)) for package in ("manifests", "layout", "prep", "runtime") for p in (ROOT / package).rglob("*.py")}
    assert sources <= set(names)


def test_tests_are_flat() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("name", ["kprep", "krun"])
def test_a_command_tells_its_version(name: str) -> None:
    assert succeed(name, "--version").out == f"{name} {version('ktier')}\n"
