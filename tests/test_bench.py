"""krun bench: fresh processes, nothing dropped, and no rates of unequal texts; its document, its table and its failures."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import typer
import xxhash
from conftest import succeed
from inside import krun, ran

from manifests.errors import BadInputError, Interrupted, UsageError
from manifests.load import load_manifest
from runtime.bench import runs as bench
from runtime.bench.chart import RateSeries
from runtime.bench.document import _ROOT, checkout_commit, driver_version, ids_digest
from runtime.bench.runs import (
    ChildError,
    Output,
    Spread,
    Variant,
    first_difference,
    is_only_cut,
    parting,
    rate_series,
    read_bench,
    running_order,
    spread_of,
    summary_of,
    table_lines,
    time_bar,
)
from runtime.cli.bench import bench_command
from runtime.live import live_line

IDS = "5,6,7,8"
PAIR = "--vram-cache 4slots --host-pool '5slots' --cold"


class Bench(NamedTuple):
    """A bench that ran through the real command, and what it left."""

    out: str
    err: str
    document: dict[str, Any]
    path: Path
    chart: Path


@pytest.fixture(scope="module")
def paired(extractions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("bench")
    path, chart = root / "b.json", root / "b.svg"
    flags = ("--repeat", 2, "-n", 6, "--device", "cpu", "--pair", PAIR, "--out", path, "--chart", chart)
    done = succeed("krun", "bench", "-m", extractions["tiny-k3.1"], "--ids", IDS, *flags, "--", "--verify-reads", 3)
    return Bench(done.out, done.err, json.loads(path.read_text()), path, chart)


def test_every_repeat_is_kept_in_the_order_in_which_it_ran(paired: Bench) -> None:
    repeats = paired.document["repeats"]
    assert [(r["configuration"], r["repeat"]) for r in repeats] == [("A", 1), ("B", 1), ("B", 2), ("A", 2)]
    assert all(len(r["ids"]) == 6 and r["prompt_ids"] == [5, 6, 7, 8] for r in repeats)
    for repeat in repeats:
        stats = repeat["stats"]
        assert {"steady_decode_tok_per_s", "prompt_pass_s", "read_amplification", "phases", "drives"} <= set(stats)
        assert 0 < stats["process_wall_s"] <= repeat["wall_s"] and repeat["ids_xxh3_128"] == ids_digest(repeat["ids"])
    # A process of its own that reads for itself: the second run of a configuration read as much as the first.
    reads = {(r["configuration"], r["stats"]["phases"]["prompt_pass"]["n_reads"]) for r in repeats}
    assert len(reads) == 2 and all(n > 0 for _, n in reads)


def test_the_document_says_what_ran_on_what(paired: Bench, extractions: dict[str, Path]) -> None:
    document, path = paired.document, extractions["tiny-k3.1"] / "manifest.yaml"
    assert document["manifest"]["generation"] == load_manifest(path).generation
    assert document["manifest"]["sha256"] == subprocess.run(["sha256sum", path], capture_output=True, text=True).stdout.split()[0]
    assert document["device"]["kind"] == "cpu" and document["device"]["n_cores"] >= 1
    assert document["versions"]["python"] == sys.version.split()[0] and document["failure"] is None
    assert document["commit"] == checkout_commit() and document["command"][:2] == ["krun", "bench"]
    assert document["date"].endswith("+00:00") and document["schema"] == 1


def test_flags_reach_the_runs_that_they_were_given_for(paired: Bench) -> None:
    a, b = (paired.document["configurations"][name] for name in "AB")
    assert b["command"] == [*a["command"], "--vram-cache", "4slots", "--host-pool", "5slots", "--cold"]
    printed_a, printed_b = ("\n".join(c["effective"]) for c in (a, b))
    assert "--vram-cache 4slots: 4 slots" in printed_b and "--host-pool 5slots: 5 slots" in printed_b
    assert "--vram-cache auto" in printed_a
    assert "1 record in 3 hashed" in printed_a and "1 record in 3 hashed" in printed_b
    reads = {r["configuration"]: r["stats"]["phases"]["decode"]["n_reads"] for r in paired.document["repeats"]}
    assert reads["B"] > reads["A"], "a cold run with small caches reads more"


def test_the_table_has_medians_with_ranges_and_the_ratio(paired: Bench) -> None:
    lines = paired.out.splitlines()
    assert lines[0].split() == ["A", "B", "B", "/", "A"]
    summary = paired.document["summary"]
    steady = next(line for line in lines if line.startswith("steady decode"))
    a, b = (summary[name]["steady_decode_tok_per_s"] for name in "AB")
    assert f"{a['median']:.3f} ({a['least']:.3f} to {a['most']:.3f})" in steady and steady.endswith(f"  {b['median'] / a['median']:.3f}")
    assert a["n"] == b["n"] == 2
    assert lines[-1].startswith("median (least to most); runs: 2 of A, 2 of B; ids ")
    assert [line.split(":")[0] for line in paired.err.splitlines()] == ["A 1 of 2", "B 1 of 2", "B 2 of 2", "A 2 of 2"]


def test_the_picture_is_one_and_has_a_bar_for_each_repeat(paired: Bench) -> None:
    texts = [e.text for e in ElementTree.parse(paired.chart).iter("{http://www.w3.org/2000/svg}text")]
    assert {"A 1", "A 2", "B 1", "B 2", "waiting for drives", "host"} <= set(texts)
    assert any(text and text.endswith("/experts (tier A)") for text in texts), "the drives over time"


def test_other_weights_are_told_by_where_the_texts_part_and_nothing_is_thrown_away(extractions: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    one, other = extractions["tiny-k3.1"], extractions["tiny-k3"]
    done = krun("bench", "-m", one, "--ids", IDS, "--repeat", 1, "-n", 4, "--pair", f"-m {other}", "--out", out)
    assert done.code == 4, done
    document = json.loads(out.read_text())
    a, b = (r["ids"] for r in document["repeats"])
    at = next(n for n in range(4) if a[n] != b[n])
    assert f"A 1 and B 1 part at new token {at + 1}: A 1 chose {a[at]}, B 1 chose {b[at]}" in done.err
    assert document["failure"] in done.err
    assert "B / A" not in done.out and done.out.splitlines()[-1].endswith("; unequal texts, no ratios")
    assert done.out.split()[:2] == ["A", "B"], "what was measured is shown all the same"


def test_an_equal_run_of_before_is_compared_and_another_text_is_refused(paired: Bench, extractions: dict[str, Path], tmp_path: Path) -> None:
    changed = json.loads(paired.path.read_text())
    changed["repeats"][3]["ids"][2] += 1
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    run = ("bench", "-m", extractions["tiny-k3.1"], "--ids", IDS, "--repeat", 1, "-n", 6, "--device", "cpu", "--against")
    done = ran(*run, paired.path)
    assert done.out.splitlines()[0].split("  ")[-1].strip() == "A / other A"
    digest = paired.document["repeats"][0]["ids_xxh3_128"]
    assert done.out.splitlines()[-1].endswith(f"; ids {digest}, equal to those of {paired.path}")
    done = krun(*run, tmp_path / "changed.json")
    assert done.code == 4 and "A 1 and other A 2 part at new token 3" in done.err
    assert "A / other" not in done.out and "equal to those" not in done.out and "other A" in done.out.splitlines()[0]


def test_a_text_of_before_of_another_prompt_ends_the_bench_after_one_run(paired: Bench, extractions: dict[str, Path]) -> None:
    """What a text's token numbers are shows when it has run; those that are given as numbers are compared before."""
    done = krun("bench", "-m", extractions["tiny-k3.1"], "-p", "xyz", "-n", 6, "--device", "cpu", "--against", paired.path)
    assert done.code == 3 and f"--against {paired.path}: made with another prompt, 4 tokens (5,6,7,8), here " in done.err
    assert "A 1 of 3" in done.err and "A 2 of 3" not in done.err and "A / other" not in done.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ids", "5,6,7", "-n", 6], r"made with another prompt, 4 tokens \(5,6,7,8\), here 3 tokens \(5,6,7\)"),
        (["--ids", IDS, "-n", 5], "made with -n 6, here it is -n 5: texts of unequal length are not compared; give -n 6, or"),
        (["-n", 7], "made with -n 6, here it is -n 7"),
        (["--", "-n", 9], "made with -n 6, here it is -n 9"),
    ],
)
def test_a_text_of_before_that_cannot_be_equal_is_refused_before_any_run(
    paired: Bench, extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch, flags: list[object], message: str
) -> None:
    with pytest.raises(BadInputError, match=f"--against {paired.path}: {message}"):
        refused(monkeypatch, "-m", extractions["tiny-k3.1"], "--against", paired.path, *flags)


def test_a_text_that_ended_by_itself_may_be_shorter_than_n() -> None:
    ended = [{"ids": [1, 2], "finish": "end"}]
    bench.check_same_length(2, ended, Path("o.json"))
    bench.check_same_length(3, ended, Path("o.json"))
    with pytest.raises(BadInputError, match="its text has 2 tokens, here it is -n 1: .*give -n 2 or more"):
        bench.check_same_length(1, ended, Path("o.json"))


def test_a_text_that_the_context_cut_is_not_called_damaged(paired: Bench, extractions: dict[str, Path]) -> None:
    run = ("bench", "-m", extractions["tiny-k3.1"], "--ids", IDS, "--repeat", 1, "-n", 6, "--device", "cpu")
    done = krun(*run, "--against", paired.path, "--", "-c", 7)
    assert done.code == 3 and "the shorter one was cut there: give both the same -n and -c" in done.err and "verify-hashes" not in done.err
    assert "A / other" not in done.out


def bench_of_documents(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[object], **fields: object) -> str:
    """Give krun bench runs that print such a document, `{label}` in what they printed being theirs; return what it says on stderr."""

    def run(arguments: list[str], *, label: str) -> dict[str, Any]:
        stats = {"steady_decode_tok_per_s": None, "device": "cpu"}
        document = {"ids": [3], "prompt_ids": [1], "stats": stats, "finish": "length", "printed": [], "wall_s": 1.0, **fields}
        return {**document, "printed": [line.format(label=label) for line in document["printed"]]}

    monkeypatch.setattr(bench, "run_krun", run)
    app = typer.Typer()
    app.command()(bench_command)
    typer.main.get_command(app).main([str(flag) for flag in flags], standalone_mode=False)
    return capfd.readouterr().err


def test_a_pair_that_comes_out_the_same_is_said_to_be_one_once(
    extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["-m", extractions["tiny-k3.1"], "--repeat", 2, "--pair", "--prefetch 0"]
    remark = "B is what A is: the flags of --pair left every setting as it was, so B / A shows chance alone"
    assert bench_of_documents(monkeypatch, capfd, flags, printed=["prefetch 0"]).splitlines().count(remark) == 1
    assert remark not in bench_of_documents(monkeypatch, capfd, flags, printed=["prefetch 0", "{label}"])
    assert remark not in bench_of_documents(monkeypatch, capfd, flags[:4], printed=["prefetch 0"])


def test_a_text_that_ends_at_once_is_said_to_time_nothing(
    extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    remark, flags = "the text ended after 1 token: nothing to time; give -p, or another one\n", ["-m", extractions["tiny-k3.1"]]
    assert bench_of_documents(monkeypatch, capfd, flags, finish="end").count(remark) == 1
    assert remark not in bench_of_documents(monkeypatch, capfd, [*flags, "-n", 1]), "as was asked"


def test_flags_of_generate_are_shown_once_bracketed_in_the_usage() -> None:
    usage = next(line for line in ran("bench", "--help").out.splitlines() if "Usage:" in line)
    assert usage.split("[OPTIONS]")[1].strip() == "[-- FLAGS]..."


def test_a_run_that_fails_is_told_in_its_own_words_and_what_ran_before_is_kept(extractions: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    done = krun("bench", "-m", extractions["tiny-k3.1"], "--ids", IDS, "-n", 2, "--repeat", 3, "--pair", f"-m {tmp_path / 'absent'}", "--out", out)
    assert done.code == 3, done
    assert f"B 1: {tmp_path / 'absent'}" in done.err and "--pair" not in done.err.split("it was: krun generate")[0]
    document = json.loads(out.read_text())
    assert [r["configuration"] for r in document["repeats"]] == ["A"] and "absent" in document["failure"]


def test_an_interrupted_bench_takes_its_child_along(extractions: dict[str, Path], tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("krun")
    arguments = ["bench", "-m", extractions["tiny-k3.1"], "--ids", IDS, "-n", "2000", "--repeat", "9", "--out", tmp_path / "o.json"]
    with subprocess.Popen([program, *map(str, arguments)], stderr=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 60
        while not (child := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code and err.startswith("krun: interrupted")
    assert child and not Path(f"/proc/{child[0]}").exists()
    assert json.loads((tmp_path / "o.json").read_text())["repeats"] == []


def refused(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Give krun bench something that it must refuse before any run."""

    def run(*_: object, **__: object) -> None:
        pytest.fail("a run was begun")

    monkeypatch.setattr(bench, "run_krun", run)
    app = typer.Typer()
    app.command()(bench_command)
    typer.main.get_command(app).main([str(a) for a in arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pair", ""], "--pair: no flags in it"),
        (["--pair", "'"], "--pair .*No closing quotation"),
        (["--pair", "--vram 3"], "would not run with .* --vram 3; nothing was measured"),
        (["--pair", "--ids 1,2", "-p", "x"], "--pair: --ids: B would make another text than A"),
        (["--pair", "-p y", "-p", "x"], "--pair: --prompt: B would make another text"),
        (["--pair", "--prompt-file /tmp/p"], "--pair: --prompt-file: B would make another text"),
        (["--pair", "-n 9 -c 20", "-n", "6"], "--pair: --n-tokens, --context: B would make another text .*for both"),
        (["--pair", "--temp 0.7 --seed 1 --top-p 0.5"], "--pair: --temp, --top-p, --seed: B would make another text"),
        (["--pair", "--long-context unverified"], "--pair: --long-context: B would make another text"),
        (["--", "--temp", "0.7"], "--temp 0.7 without --seed"),
        (["--prompt-file", "/tmp/p", "-p", "x"], "give one of --prompt TEXT, --ids 1,2,3 and --prompt-file F"),
        (["--", "--no-such-flag"], "would not run with .* --no-such-flag"),
        (["--", "stray"], "would not run with .* stray"),
        (["--", "-n", "few"], "would not run with .* -n few"),
        (["--", "--help"], "would not run with .* --help"),
        (["--ids", "1", "--prompt", "x"], "give one of --prompt TEXT, --ids 1,2,3"),
        (["--", "--stats-json", "/tmp/s.json"], "--stats-json: each run would write over the file of the one before"),
        (["--", "--heat-out", "/tmp/h.json"], "--heat-out: each run would write over"),
        (["--pair", "--state-out /tmp/s"], "--state-out: each run would write over"),
        (["--synthetic", "tiny"], "exactly one of -m MANIFEST and --synthetic"),
        (["--dir", "/tmp"], "--dir: without effect with -m"),
        (["--rows", "1", "--routing", "zipf", "--keep-files"], "--routing, --rows, --keep-files: without effect with -m"),
        (["--seed", "0", "--warm", "0"], "--warm, --seed: without effect with -m"),
        (["--", "--prefetch", "3"], "would not run with .* --prefetch 3"),
        (["--out", "/proc/absent/x.json"], "--out .*there is no directory /proc/absent"),
        (["--chart", "/proc"], "--chart /proc: is a directory"),
    ],
)
def test_what_generate_would_refuse_is_refused_before_any_run(
    extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        refused(monkeypatch, "-m", extractions["tiny-k3.1"], *flags)


def test_what_generate_does_not_like_is_said_in_its_own_words(
    extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):
        refused(monkeypatch, "-m", extractions["tiny-k3.1"], "--", "--no-such-flag")
    assert "No such option: --no-such-flag" in capfd.readouterr().err


def test_every_named_flag_reaches_generate(extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []

    def run(arguments: list[str], *, label: str) -> None:
        begun.append(list(arguments))
        raise ChildError("enough", 9)

    monkeypatch.setattr(bench, "run_krun", run)
    app = typer.Typer()
    app.command()(bench_command)
    flags = ["--device", "cpu", "--vram-cache", "4slots", "--host-pool", "5slots", "--cold", "-n", "7", "--prefetch", "1", "--", "--chunk", "3"]
    with pytest.raises(ChildError):
        typer.main.get_command(app).main(["-m", str(extractions["tiny-k3.1"]), *flags], standalone_mode=False)
    (arguments,) = begun
    given = [*flags[:6], "--cold", "--chunk", "3", "-n", "7", "--json"]
    assert arguments[0] == "generate" and all(flag in arguments for flag in given)
    pairs = set(pairwise(arguments))
    assert {("--device", "cpu"), ("--vram-cache", "4slots"), ("--host-pool", "5slots"), ("-n", "7"), ("--chunk", "3"), ("--prefetch", "1")} <= pairs
    assert "lighthouse" in arguments[arguments.index("--prompt") + 1]
    with pytest.raises(ChildError):
        typer.main.get_command(app).main(["-m", str(extractions["tiny-k3.1"]), "--prompt-file", "p.txt"], standalone_mode=False)
    assert ("--prompt-file", "p.txt") in pairwise(begun[1]) and "--prompt" not in begun[1]


@pytest.mark.parametrize(
    "content",
    [None, "", "[]", "{}", '{"repeats": []}', '{"repeats": [{"ids": [1]}]}', '{"repeats": [5]}', "\xff", "[" * 100_000],
    ids=lambda content: str(content)[:30],
)
def test_a_file_that_is_no_bench_is_refused_before_any_run(
    extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(BadInputError, match=f"{path}: "):
        refused(monkeypatch, "-m", extractions["tiny-k3.1"], "--against", path)


@pytest.mark.parametrize(
    "stats",
    [
        {"phases": []},
        {"phases": None},
        {"phases": {"decode": 5}},
        {"phases": {"decode": {"n_device_hits": "x", "n_experts_used": 3}}},
        {"phases": {"decode": {"n_device_hits": 1, "n_experts_used": []}}},
        {"prompt_pass_s": "x"},
        {"prompt_pass_s": True},
        {"process_wall_s": {}},
        {"storage_efficiency": float("nan")},
        {"steady_decode_tok_per_s": 10**400},
        {"expert_read_bytes": None},
        {"expert_read_bytes": 7},
        {"expert_read_bytes": []},
        {"expert_read_bytes": {"decode": -1}},
    ],
    ids=lambda stats: str(stats)[:60],
)
def test_figures_of_before_that_are_none_are_refused_before_any_run(
    extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stats: dict[str, Any]
) -> None:
    path, good = tmp_path / "other.json", {"configuration": "A", "repeat": 1, "ids": [1], "prompt_ids": [1]}
    path.write_text(json.dumps({"repeats": [{**good, "stats": {}}]}))
    assert summary_of(read_bench(path)["repeats"])["A"]["prompt_pass_s"] is None
    path.write_text(json.dumps({"repeats": [{**good, "stats": {}}, {**good, "stats": stats}]}))
    with pytest.raises(BadInputError, match=f"{path}: no repeats with ids and stats in it, or figures that are no numbers"):
        refused(monkeypatch, "-m", extractions["tiny-k3.1"], "--against", path)


def test_a_bench_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="exactly one of -m MANIFEST and --synthetic"):
        refused(monkeypatch)


def test_a_manifest_that_is_none_is_refused_before_any_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BadInputError):
        refused(monkeypatch, "-m", tmp_path / "manifest.yaml")


def test_repeats_go_forwards_and_backwards_in_turn() -> None:
    a, b = Variant("A", ()), Variant("B", ())
    assert "".join(turn.variant.name for turn in running_order([a, b], 4)) == "ABBAABBA"
    assert [(turn.variant.name, turn.repeat) for turn in running_order([a], 3)] == [("A", 1), ("A", 2), ("A", 3)]


def test_the_first_token_that_differs_is_named() -> None:
    one = Output("A 1", [1, 2, 3])
    assert first_difference([one]) is None and first_difference([one, one._replace(name="A 2")]) is None
    other, short = Output("A 2", [1, 9, 3]), Output("B 1", [1, 2])
    assert first_difference([one, other, short]) == (one, other) and first_difference([one, one, short]) == (one, short)
    assert parting(one, other) == "A 1 and A 2 part at new token 2: A 1 chose 2, A 2 chose 9"
    assert parting(one, short) == "A 1 and B 1 part at new token 3: A 1 chose 3, B 1 ended after 2 tokens"
    assert parting(Output("A 1", []), Output("A 2", [4])) == "A 1 and A 2 part at new token 1: A 1 ended after 0 tokens, A 2 chose 4"


def test_a_text_is_only_cut_if_a_limit_ended_it_where_the_longer_one_goes_on() -> None:
    long, cut = Output("A 1", [1, 2, 3]), Output("B 1", [1, 2], is_cut=True)
    assert is_only_cut(long, cut) and is_only_cut(cut, long)
    assert not is_only_cut(long, cut._replace(is_cut=False)) and not is_only_cut(long, cut._replace(ids=[1, 9]))
    assert not is_only_cut(long._replace(is_cut=True), cut._replace(is_cut=False)), "the longer one's end says nothing"


def test_another_prompt_is_not_compared() -> None:
    same, other = {"prompt_ids": [1, 2]}, {"prompt_ids": list(range(9))}
    bench.check_same_prompt([1, 2], [same, same], Path("o.json"))
    with pytest.raises(BadInputError, match=r"made with another prompt, 9 tokens \(0,1,2,3,4,5,6,7, ...\), here 2 tokens \(1,2\): use"):
        bench.check_same_prompt([1, 2], [same, other], Path("o.json"))
    with pytest.raises(BadInputError, match="0 tokens"):
        bench.check_same_prompt([1, 2], [{"prompt_ids": []}], Path("o.json"))


def test_a_median_keeps_its_ends_and_what_was_not_measured_is_not_counted() -> None:
    assert spread_of([3.0, 1.0, None, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread_of([None, None]) is None


def repeat(configuration: str, number: int, **stats: object) -> dict[str, Any]:
    return {"configuration": configuration, "repeat": number, "ids": [1, 2, 3, 4, 5], "wall_s": 2.0, "stats": stats}


def test_figures_that_were_not_measured_are_none_in_the_table() -> None:
    summary = summary_of([repeat("A", 1, steady_decode_tok_per_s=2.0), repeat("B", 1, steady_decode_tok_per_s=3.0)])
    lines = {line[:22].strip(): line for line in table_lines(summary, {"B / A": ("B", "A")})}
    assert lines["steady decode, tok/s"].split()[3:] == ["2.000", "3.000", "1.500"]
    assert lines["storage efficiency"].split()[2:] == ["none", "none"]


def test_a_token_s_parts_add_up_to_its_time() -> None:
    bar = time_bar(repeat("A", 2, generation_tok_per_s=5.0, phases={"decode": {"wait_s": 0.6, "gpu_s": 0.2}}))
    assert bar.name == "A 2" and dict(bar.parts) == pytest.approx({"waiting for drives": 0.15, "GPU": 0.05, "rest": 0.05})
    assert time_bar(repeat("A", 1, generation_tok_per_s=None)).parts == ()


def test_samples_become_the_rate_of_each_drive() -> None:
    drives = [{"directory": "/a", "tier": "A"}, {"directory": "/b", "tier": "C"}]
    samples = [{"t_s": 0.0, "read_bytes": [0, 0]}, {"t_s": 1.0, "read_bytes": [10, 4]}, {"t_s": 3.0, "read_bytes": [50, 4]}]
    assert rate_series(repeat("A", 1, drives=drives, samples=samples)) == [
        RateSeries("/a (tier A)", ((0.0, 1.0, 10.0), (1.0, 3.0, 20.0))),
        RateSeries("/b (tier C)", ((0.0, 1.0, 4.0), (1.0, 3.0, 0.0))),
    ]
    assert rate_series(repeat("A", 1, drives=drives))[0].intervals == ()


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        (
            "import sys; print('krun: this is why', file=sys.stderr); sys.exit(5)",
            5,
            r"^A 1: this is why\n  it was: krun generate -x\n  and ended with exit code 5$",
        ),
        ("import os; os.kill(os.getpid(), 9)", 1, "it said nothing(.|\n)*signal 9, as the kernel sends when memory runs out"),
        ("raise ValueError('a fault of ours')", 1, "ValueError: a fault of ours(.|\n)*exit code 1"),
    ],
)
def test_however_a_child_ends_it_is_told(monkeypatch: pytest.MonkeyPatch, program: str, code: int, message: str) -> None:
    monkeypatch.setattr(bench, "_KRUN", (sys.executable, "-c", program))
    with pytest.raises(ChildError, match=message) as caught:
        bench.run_krun(["generate", "-x"], label="A 1")
    assert caught.value.exit_code == code


def test_an_interrupt_while_a_child_is_begun_waits_until_it_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        os.kill(os.getpid(), signal.SIGINT)
        begun.append(real(*arguments, **options))
        return begun[0]

    monkeypatch.setattr(bench.subprocess, "Popen", popen)
    monkeypatch.setattr(bench, "_KRUN", (sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(KeyboardInterrupt):
        bench.run_krun([], label="A 1")
    assert begun[0].returncode == -signal.SIGTERM


def test_a_stranger_s_package_in_the_current_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChildError, match=r"(?s)give exactly one of -p TEXT"):
        bench.run_krun(["generate", "-m", "absent"], label="A 1")


def test_a_document_is_read_as_it_was_written(paired: Bench) -> None:
    assert read_bench(paired.path) == paired.document


def test_ids_are_hashed_as_little_endian_64_bit_numbers() -> None:
    assert ids_digest([1, -2]) == xxhash.xxh3_128_hexdigest(b"\x01" + bytes(7) + b"\xfe" + b"\xff" * 7)


def test_the_driver_s_version_is_the_kernel_s_word(tmp_path: Path) -> None:
    assert driver_version(proc_root=tmp_path) is None
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)  Tue Nov  4\nGCC version: 13\n"
    (tmp_path / "driver/nvidia/version").write_text(text)
    assert driver_version(proc_root=tmp_path) == "580.159.04"


def test_a_directory_without_git_has_no_commit(tmp_path: Path) -> None:
    assert checkout_commit(tmp_path) is None
    run = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*run, *arguments], check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"})
    commit = checkout_commit(tmp_path)
    assert commit is not None and len(commit) == 40


def test_the_checkout_that_the_program_runs_from_is_this_one() -> None:
    assert (_ROOT / "pyproject.toml").is_file()
    if not (_ROOT / ".git").exists():
        pytest.skip("no checkout")
    head = subprocess.run(["git", "-C", _ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    commit = checkout_commit()
    assert len(head) == 40 and commit is not None and commit.removesuffix("-dirty") == head


def test_the_live_line_shows_rates_and_shares_once_there_are_any() -> None:
    counts = {"read_bytes": 55 * 10**9, "n_device_hits": 2, "n_host_hits": 1, "n_reads": 1}
    assert live_line(n_tokens=4, seconds=2.0, **counts) == "4 tok  2.00 tok/s  27.5GB/s  VRAM 50%  host 25%  drives 25%"
    assert live_line(n_tokens=0, seconds=0.0, read_bytes=0, n_device_hits=0, n_host_hits=0, n_reads=0) == "0 tok"
