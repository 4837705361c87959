"""Uploads beside a measurement: what the uploading process says, and how its every failure ends in a message."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_measure_reads import make_files

from manifests.errors import DeviceError, KtierError, UsageError
from prep.measuring.measure import measure_drives
from prep.measuring.upload_process import UploadProcess, UploadRate, uploads_command
from runtime.upload_load import upload_until_closed

ROOT = Path(__file__).parent.parent
GOOD = """\
import json, sys
print("ready", flush=True)
sys.stdin.read()
print(json.dumps({"bytes": 10, "seconds": 2.0, "bytes_per_s": 5.0, "device": "GPU 7"}))
"""
# What `krun uploads` does, for a test that needs no command line.
REAL = """\
import json, sys
from runtime.upload_load import upload_until_closed
facts = upload_until_closed(sys.stdin.fileno(), seconds=float(sys.argv[1]), record_bytes=int(sys.argv[2]), on_ready=lambda: print("ready", flush=True))
print(json.dumps(facts), flush=True)
"""


def script(tmp_path: Path, text: str) -> list[str]:
    """Return a command that runs a program; its process number is then in tmp_path/pid."""
    path = tmp_path / "uploads.py"
    path.write_text(f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{text}")
    return [sys.executable, str(path)]


def has_ended(tmp_path: Path) -> bool:
    return not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_uploads_run_until_they_are_ended_and_give_their_rate(tmp_path: Path) -> None:
    with UploadProcess(script(tmp_path, GOOD)) as process:
        assert not has_ended(tmp_path)
        assert process.finish() == UploadRate("GPU 7", 5.0)
    assert has_ended(tmp_path)


def test_an_error_of_ours_ends_the_process(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), UploadProcess(script(tmp_path, GOOD)):
        raise RuntimeError
    assert has_ended(tmp_path)


FAILURES = [
    (
        "import sys; print('krun: no CUDA device', file=sys.stderr); sys.exit(6)",
        DeviceError,
        "ended without ready, exit code 6: krun: no CUDA device",
    ),
    ("import sys; sys.exit(3)", KtierError, "the uploads ended without ready, exit code 3: it gave no reason"),
    ("import os; os.abort()", KtierError, "the uploads ended without ready, exit code -6"),
    ("print('Usage: krun', flush=True); input()", KtierError, "the uploads began with 'Usage: krun', expected the line ready"),
    ("import time; time.sleep(60)", KtierError, "the uploads did not say ready within 1 s"),
    ("import sys, time; sys.stdout.write('read'); sys.stdout.flush(); time.sleep(60)", KtierError, "did not say ready within 1 s"),
]


@pytest.mark.parametrize(("text", "kind", "message"), FAILURES, ids=[f[2][:40] for f in FAILURES])
def test_uploads_that_do_not_begin_are_told(tmp_path: Path, text: str, kind: type[KtierError], message: str) -> None:
    with pytest.raises(kind) as error:
        UploadProcess(script(tmp_path, text), ready_within_s=1 if "sleep" in text else 60)
    assert message in str(error.value) and type(error.value) is kind
    assert has_ended(tmp_path)


BAD_ENDS = [
    ("sys.stdin.read(); print('3 GB/s')", "the uploads ended with '3 GB/s', expected JSON"),
    ("sys.stdin.read(); print('{}')", "the uploads ended with '{}', expected JSON"),
    ("sys.stdin.read(); print('[1]')", "expected JSON"),
    ("sys.stdin.read(); print('lost', file=sys.stderr); sys.exit(1)", "the uploads ended without a last line, exit code 1: lost"),
    ("time.sleep(60)", "the uploads did not say a last line within 1 s"),
]


@pytest.mark.parametrize(("text", "message"), BAD_ENDS)
def test_uploads_that_do_not_end_well_are_told(tmp_path: Path, text: str, message: str) -> None:
    command = script(tmp_path, f"import sys, time\nprint('ready', flush=True)\n{text}")
    with pytest.raises(KtierError) as error, UploadProcess(command, end_within_s=1 if "sleep" in text else 60) as process:
        process.finish()
    assert message in str(error.value)
    assert has_ended(tmp_path)


def test_uploads_that_ended_before_the_measurement_did_do_not_count(tmp_path: Path) -> None:
    command = script(tmp_path, 'print(\'ready\', flush=True); print(\'{"bytes_per_s": 5.0, "device": "GPU"}\', flush=True)')
    with pytest.raises(KtierError, match="the uploads ended before the drives were measured, exit code 0"), UploadProcess(command) as process:
        while not _is_done(process):
            time.sleep(0.01)
        process.finish()


def _is_done(process: UploadProcess) -> bool:
    return process._process.poll() is not None


def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(KtierError, match="/no/such/krun: cannot be started for the uploads: No such file"):
        UploadProcess(["/no/such/krun"])


def test_a_flood_of_errors_does_not_block_the_uploads(tmp_path: Path) -> None:
    with UploadProcess(script(tmp_path, f"import sys\nsys.stderr.write('x' * 1_000_000)\n{GOOD}")) as process:
        assert process.finish().bytes_per_s == 5.0


def test_the_command_is_that_of_the_krun_beside_this_python() -> None:
    program, *arguments = uploads_command(9792)
    assert os.access(program, os.X_OK) and Path(program).name == "krun"
    assert arguments[0] == "uploads" and arguments[-2:] == ["--record-bytes", "9792"]


def test_drives_are_measured_beside_uploads_too(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        make_files(directory, 20)
    steps: list[str] = []
    command = script(tmp_path, GOOD)
    measured = measure_drives(directories, record_bytes=9792, seconds=0.05, with_uploads=command, on_progress=steps.append)
    assert measured.uploads is not None and (measured.uploads.device, measured.uploads.upload_bytes_per_s) == ("GPU 7", 5.0)
    assert measured.uploads.together_bytes_per_s > 0
    assert all(p.with_uploads_bytes_per_s is not None and p.with_uploads_bytes_per_s > 0 for p in measured.profiles)
    assert steps[-1].startswith("beside uploads of 5B/s to GPU 7: ")
    assert has_ended(tmp_path)


def test_failing_uploads_fail_the_measurement_and_leave_no_trial_files(tmp_path: Path) -> None:
    drive = tmp_path / "a"
    drive.mkdir()
    said: list[str] = []
    with pytest.raises(DeviceError, match="no CUDA"):
        measure_drives([drive], record_bytes=9792, seconds=0.02, with_uploads=script(tmp_path, FAILURES[0][0]), on_progress=said.append)
    assert list(drive.iterdir()) == []
    assert not any(" at depth " in text for text in said), "nothing is measured before a GPU is known to be there"


@pytest.mark.parametrize(("seconds", "record_bytes"), [(0, 9792), (float("nan"), 9792), (float("inf"), 9792), (1, 0)])
def test_uploads_of_nothing_are_refused(seconds: float, record_bytes: int) -> None:
    with pytest.raises(UsageError, match="both must be above zero"):
        upload_until_closed(0, seconds=seconds, record_bytes=record_bytes, on_ready=lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_uploads_are_a_device_error() -> None:
    with pytest.raises(DeviceError, match="there is no CUDA device to upload to"):
        upload_until_closed(0, seconds=1, record_bytes=9792, on_ready=lambda: pytest.fail("not ready"))


def start_real(seconds: float, record_bytes: int) -> list[str]:
    return [sys.executable, "-c", REAL, str(seconds), str(record_bytes)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_takes_uploads_until_their_input_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    make_files(tmp_path, 20)
    measured = measure_drives([tmp_path], record_bytes=9792, seconds=0.2, with_uploads=start_real(600, 17_547_264))
    assert measured.uploads is not None and measured.uploads.device == torch.cuda.get_device_name()
    print(f"uploads of 17547264 bytes: {measured.uploads.upload_bytes_per_s / 1e9:.1f} GB/s")
    assert measured.uploads.upload_bytes_per_s > 1e8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("record_bytes", [9792, 17_547_264])
def test_a_gpu_takes_uploads_for_a_time_though_their_input_stays_open(record_bytes: int) -> None:
    process = subprocess.Popen(
        start_real(0.5, record_bytes), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdin is not None and process.stderr is not None
    lines, code = process.stdout.read().splitlines(), process.wait(60)
    errors = process.stderr.read()
    process.stdin.close()
    assert (code, errors) == (0, "") and lines[0] == "ready" and len(lines) == 2
    facts = json.loads(lines[1])
    assert facts["bytes"] >= 8 * record_bytes and facts["bytes"] % record_bytes == 0 and facts["seconds"] >= 0.5
    assert facts["bytes_per_s"] == pytest.approx(facts["bytes"] / facts["seconds"])
