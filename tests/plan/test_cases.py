"""The golden-case runner: on the shipped cases, on the public file where it is there, and on wrong files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv.testing import cases

HERE = Path(__file__).parent
PUBLIC = HERE.parents[1].parent / "shared" / "cases" / "reach.json"


def test_the_shipped_cases_hold(capsys):
    assert cases.main([str(HERE / "cases.json")]) == 0
    assert capsys.readouterr().out == "27 checks, 0 failed\n"


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public cases are not beside this checkout")
def test_the_public_cases_hold(capsys):
    assert cases.main([str(PUBLIC), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"checks": 10_153, "failed": 0, "failures": []}


def _wrong_cases():
    """Every answer of a shipped case, one at a time, replaced by a wrong one."""
    case = json.loads((HERE / "cases.json").read_text())[0]
    for field, wrong in [
        ("boundaries", [7]),
        ("save", ["0", "0"]),
        ("lookup", ["0", "0"]),
        ("alignment", 7),
        ("steps", [{**case["steps"][0], "save": ["0", "0"]}]),
        ("round_trip", [{**case["round_trip"][0], "hit": 7}]),
        ("junction", {**case["junction"], "boundaries": [7]}),
        ("presence", [{**case["presence"][0], "hit": 7}]),
        ("presence", [{**case["presence"][0], "load": ["00", "00000000"]}]),
    ]:
        yield {**case, field: wrong}


@pytest.mark.parametrize("case", list(_wrong_cases()), ids=lambda case: str(case["id"]))
def test_each_wrong_answer_is_found(case, tmp_path, capsys):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps([case]))
    assert cases.main([str(path)]) == 1
    assert "expected" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[{}]", "[1]", "[]"])
def test_a_file_without_cases_fails(text, tmp_path, capsys):
    path = tmp_path / "no.json"
    path.write_text(text)
    assert cases.main([str(path)]) == 2
    capsys.readouterr()


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "hybridkv.testing.cases"]
    assert (
        subprocess.run([*command, str(HERE / "cases.json")], check=False, capture_output=True).returncode == 0
    )
    assert subprocess.run(command, check=False, capture_output=True).returncode == 2
