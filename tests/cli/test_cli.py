"""The command line as its users meet it: in a process of its own for the exit codes, else in this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv import __version__
from hybridkv.cli import main
from hybridkv.sim.generate import generate_trace
from hybridkv.sim.payload import PatternBytes
from hybridkv.specs.layout_file import catalogue

LINE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}'


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line and returns (exit code, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hybridkv", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            sys.exit(main())
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": request.timestamp_ms,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        for request in generate_trace(1, 3)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_replay_prints_a_report_and_writes_json(run, trace, tmp_path):
    out = tmp_path / "report.json"
    code, text, _ = run(
        "replay",
        trace,
        "--model",
        "gpt-oss-120b",
        "--bytes",
        "--payload-scale",
        "1/64",
        *("--store", "memory://?capacity=1GiB", "--json", out),
    )
    assert code == 0
    assert "hit tokens" in text
    assert "sliding (sliding_window)" in text
    report = json.loads(out.read_text())
    assert report["hit_tokens"] == report["unbounded_hit_tokens"] > 0
    assert report["bytes_verified"]
    assert [group["name"] for group in report["groups"]] == ["sliding", "full"]


def test_json_on_standard_output_stands_alone(run, trace):
    code, text, _ = run(
        "replay", trace, "--model", "qwen3-next-80b", "--prefill-tokens", "2048", "--json", "-"
    )
    assert code == 0
    assert json.loads(text)["states"] == "states where a step ended"


def test_all_options_together_are_taken(run, trace):
    code, text, _ = run(
        *(
            "replay",
            trace,
            "--model",
            "llama-3.1-8b",
            "--store",
            "memory://?capacity=1GiB",
            "--retention",
            "256",
        ),
        *("--object-tokens", "256", "--tails", "continued", "--tp", "2", "--limit", "5", "--json", "-"),
    )
    report = json.loads(text)
    assert code == 0
    assert (report["requests"], report["retention"], report["tp"], report["tails"]) == (
        5,
        256,
        2,
        "continued",
    )


def test_bad_lines_can_be_skipped_and_are_counted(run, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE}\nnot json\n{LINE}\n")
    code, text, _ = run("replay", path, "--model", "deepseek-v3", "--skip-bad", "--json", "-")
    assert (code, json.loads(text)["skipped_lines"], json.loads(text)["requests"]) == (0, 1, 2)
    code, text, _ = run("replay", path, "--model", "deepseek-v3", "--skip-bad")
    assert "trace.jsonl:2" in "".join(text.split())


def test_the_demo_compares_three_caches_on_three_models(run):
    code, text, _ = run("demo", "--json", "-")
    rows = json.loads(text)
    assert code == 0
    assert len(rows) == 9
    for model in {row["model"] for row in rows}:
        prefix_only, everything, ends = (row for row in rows if row["model"] == model)
        assert ends["hit_tokens"] > prefix_only["hit_tokens"] > 0
        stored = [sum(g["saved_bytes"] for g in row["groups"]) for row in (prefix_only, everything, ends)]
        assert stored[2] < stored[1]
        assert stored[2] < stored[0] / 1.5
        assert len({row["capacity_bytes"] for row in (prefix_only, everything, ends)}) == 1
        assert all(row["bytes_verified"] for row in (prefix_only, everything, ends))


def test_the_demo_prints_a_table(run):
    code, text, _ = run("demo")
    assert code == 0
    assert "prefix-only" in text


def test_models_lists_the_catalogue(run):
    code, text, _ = run("models", "--json", "-")
    assert (code, [layout["name"] for layout in json.loads(text)]) == (0, catalogue())
    assert "gemma-3-27b" in run("models")[1]


def test_version_and_help(run):
    assert run("--version") == (0, f"hybridkv {__version__}\n", "")
    code, text, _ = run("replay", "--help")
    assert code == 0
    assert "Example: hybridkv replay" in " ".join(text.split())


def test_wrong_bytes_end_with_exit_code_1(run, trace, monkeypatch):
    monkeypatch.setattr(PatternBytes, "_holds", lambda *_: False)
    code, _, error = run(
        "replay", trace, "--model", "llama-3.1-8b", "--bytes", "--payload-scale", "1/64", *BOUNDED
    )
    assert code == 1
    assert error.startswith("hybridkv: object hkv1/")


def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m hybridkv.cli models --json - | true"
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


BOUNDED = ("--store", "memory://?capacity=1GiB")
BASE = ("--model", "gpt-oss-120b")
BAD_LINES = {
    "a field is missing": '{"timestamp": 0, "output_length": 5, "hash_ids": [0]}',
    "a length is negative": '{"timestamp": 0, "input_length": -6, "output_length": 5, "hash_ids": [0]}',
    "a length is huge": '{"timestamp": 0, "input_length": 1e300, "output_length": 5, "hash_ids": [0]}',
    "a length is text": '{"timestamp": 0, "input_length": "600", "output_length": 5, "hash_ids": [0, 1]}',
    "a time is not finite": '{"timestamp": NaN, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}',
    "ids are too few": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0]}',
    "an id is negative": '{"timestamp": 0, "input_length": 60, "output_length": 5, "hash_ids": [-1]}',
    "an id is there twice": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 0]}',
    "an id has two parents": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [2, 1]}',
    "a line is no object": "[1, 2]",
    "a line is no JSON": "{",
    "a line is nested too deep": "[" * 100_000,
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_wrong_line_is_named_and_nothing_is_shown(run, tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE}\n{line}\n")
    code, text, error = run("replay", path, *BASE)
    assert (code, text) == (2, "")
    assert error.startswith(f"hybridkv: {path}:2: ")
    assert error.count("\n") == 1


BAD_ARGUMENTS = [
    (("--model", "gpt-os-120b"), "did you mean 'gpt-oss-120b'"),
    (("--model", "broken.toml"), "broken.toml: not TOML"),
    (("--model", "."), "neither a layout file nor built in"),
    ((*BASE, "--store", "memory://?capacity=1KiB"), "smaller than one object"),
    ((*BASE, "--store", "memory://?capacity=lots"), "lots"),
    ((*BASE, "--store", "memory://?capacity=-1GiB"), "-1GiB"),
    ((*BASE, "--store", "memory://?capacity="), "no value"),
    ((*BASE, "--store", "memory://?capacty=1GiB"), "did you mean 'capacity'"),
    ((*BASE, "--store", "memory://?capacity=1GiB&capacity=2GiB"), "given twice"),
    ((*BASE, "--store", "memory://somewhere?capacity=1GiB"), "no place"),
    ((*BASE, "--store", "memry://", "--bytes"), "did you mean 'memory'"),
    ((*BASE, "--store", "redis://x"), "unknown store 'redis'"),
    ((*BASE, "--bytes"), "needs a bounded store"),
    ((*BASE, "--store", "memory"), "begins with its scheme"),
    ((*BASE, "--retention", "some"), "retention is 'some'"),
    ((*BASE, "--retention", "-16"), "retention is '-16'"),
    ((*BASE, "--retention", "100"), "use 96 or 112"),
    ((*BASE, "--retention", "9" * 30), "retention is '999"),
    ((*BASE, "--tails", "long"), "tails is 'long'"),
    ((*BASE, "--tp", "0"), "tp is 0"),
    ((*BASE, "--tp", "3"), "8 shards (KV heads) do not fit 3"),
    ((*BASE, "--object-tokens", "100"), "100 tokens"),
    ((*BASE, "--object-tokens", "-16"), "-16 tokens"),
    ((*BASE, "--prefill-tokens", "0"), "prefill tokens is 0"),
    ((*BASE, "--payload-scale", "1/0"), "payload scale is '1/0'"),
    ((*BASE, "--payload-scale", "nan"), "payload scale is 'nan'"),
    ((*BASE, "--payload-scale", "3"), "payload scale is 3"),
    ((*BASE, "--payload-scale", "1e-99999999"), "payload scale is '1e-99999999'"),
    ((*BASE, "--payload-scale", "0/0"), "payload scale is '0/0'"),
    (("--model", "x" * 300), "neither a layout file"),
    (
        (*BASE, "--object-tokens", "65536", "--bytes", "--store", "memory://?capacity=1TiB"),
        "too large to move",
    ),
    ((*BASE, "--limit", "0"), "limit is 0"),
    ((*BASE, "--json", "no/such/folder/report.json"), "cannot be written"),
    ((*BASE, "--json", "."), "cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=lambda value: " ".join(value)[:60])
def test_a_wrong_argument_gets_one_line_and_exit_code_2(
    run, trace, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("[[groups]")
    code, _, error = run("replay", trace, *arguments)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "content", [None, b"", b"\n\n", b"\xff\xfe\x00"], ids=["missing", "empty", "blank", "binary"]
)
def test_a_file_that_is_no_trace_gets_one_line(run, tmp_path, content):
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    code, _, error = run("replay", path, *BASE)
    assert code == 2
    assert error.startswith(f"hybridkv: {path}")
    assert error.count("\n") == 1


def test_names_are_shown_as_text_never_as_markup(run, tmp_path, trace):
    path = tmp_path / "[bold].toml"
    path.write_text(
        'name = "[/red] \\u00e9"\n[[groups]]\nkind = "full"\nname = "[/b]"\nblock_size = 16\nlayers = 1\n'
        "layer_block_bytes = 1\n"
    )
    bad = tmp_path / "[b].jsonl"
    bad.write_text(trace.read_text() + '{"timestamp": "[/red]"}\n')
    code, text, error = run("replay", bad, "--model", path, "--skip-bad")
    assert (code, error) == (0, "")
    assert "[/red] \u00e9" in text
    assert "[/b] (full)" in text


@pytest.mark.parametrize(
    ("redirection", "code"), [(">/dev/full", 2), (">&-", 0), (">/dev/full 2>&-", 2), ("2>/dev/full", 0)]
)
def test_an_output_that_cannot_be_written_leaves_no_traceback(redirection, code):
    command = f"{sys.executable} -m hybridkv.cli models {redirection}"
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode == code


def test_a_terminal_that_knows_only_ascii_gets_escapes(tmp_path, trace):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "\u00e9"\n[[groups]]\nkind = "full"\nblock_size = 16\nlayers = 1\nlayer_block_bytes = 1'
    )
    command = [sys.executable, "-m", "hybridkv.cli", "replay", trace, "--model", path]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert "\\xe9" in done.stdout


def test_a_directory_is_no_trace(run, tmp_path):
    code, _, error = run("replay", tmp_path, *BASE)
    assert (code, error.count("\n")) == (2, 1)


def test_importing_hybridkv_brings_neither_torch_nor_an_engine():
    script = (
        "import hybridkv, hybridkv.cli, hybridkv.stores.registry, sys;"
        "print(sorted({'torch', 'vllm', 'sglang', 'mooncake', 'pytest', 'hypothesis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
