"""kill -9 at 30 instants of a placement: the manifest that is there is true, and the same command goes on and ends the same."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from placing import check_drives, check_manifest_is_true, experts_in, named, place, tier_flags

from manifests.load import load_manifest

N_CHAINS = 6
KILLS_PER_CHAIN = 5
FLAGS = ("--limit", "A=90slots", "--limit", "B=100slots", "--remove-unplanned", "--json")


class Scene:
    """A model and the drives that it is to be placed on: 90 and 100 experts of the base on one device."""

    def __init__(self, home: Path, root: Path) -> None:
        self.home, self.drives = home, (root / "a", root / "b")
        self.tiers = (f"A={self.drives[0]}", f"B={self.drives[1]}")

    def progress(self) -> int:
        """Files that are done: copied, or removed from where they came."""
        return sum(len(experts_in(drive)) for drive in self.drives if drive.is_dir()) + 144 - len(experts_in(self.home / "experts"))

    def start(self) -> subprocess.Popen[str]:
        program = Path(sys.executable).with_name("kprep")
        words = [program, "place", self.home / "manifest.yaml", *tier_flags(self.tiers), *FLAGS]
        return subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def kill_at(self, n: int, wait_s: float) -> bool:
        """Run the command and kill it once so many files are done and some time has passed; say whether it was still at work."""
        process = self.start()
        try:
            deadline = time.monotonic() + 60
            while process.poll() is None and self.progress() < n:
                assert time.monotonic() < deadline
                time.sleep(0.0005)
            time.sleep(wait_s)
        finally:
            process.kill()
            out, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), (out, err)
        return process.returncode != 0


@pytest.fixture(scope="module")
def ending(extractions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What each drive holds after an undisturbed run."""
    root = tmp_path_factory.mktemp("undisturbed")
    scene = Scene(Path(shutil.copytree(extractions["tiny-k3.1"], root / "model")), root)
    place(scene.home, *scene.tiers, flags=FLAGS)
    assert experts_in(scene.home / "experts") == set()
    return {drive.name: experts_in(drive) for drive in scene.drives}


@pytest.mark.parametrize("chain", range(N_CHAINS))
def test_killed_at_any_instant_the_manifest_is_true_and_the_same_command_ends_the_same(
    extractions: dict[str, Path], prepared_copy: Path, tmp_path: Path, ending: dict[str, set[str]], chain: int
) -> None:
    scene, rng = Scene(prepared_copy, tmp_path), random.Random(chain)
    good = extractions["tiny-k3.1"]
    # Spread over the whole work: 144 files to copy and 144 to remove.
    instants = [280 * (n * N_CHAINS + rng.randrange(N_CHAINS)) // (N_CHAINS * KILLS_PER_CHAIN) for n in range(KILLS_PER_CHAIN)]
    n_kills = 0
    for instant in instants:
        n_kills += scene.kill_at(instant, rng.random() * 0.02)
        check_manifest_is_true(scene.home, good)
    place(scene.home, *scene.tiers, flags=FLAGS)
    assert sum(check_drives(scene.home, good, is_verifying=chain == 0)) == 144
    assert {drive.name: experts_in(drive) for drive in scene.drives} == ending
    assert named(load_manifest(scene.home / "manifest.yaml"), scene.home) == {drive: ending[drive.name] for drive in scene.drives}
    assert experts_in(scene.home / "experts") == set() and list(tmp_path.rglob("*.partial")) == []
    assert n_kills >= 1, "every kill came after the end"
