"""The demonstration: what two engines that share a store give, and what is said when something is wrong."""

from dataclasses import replace

import pytest

from hybridkv.adapters.vllm import demo
from hybridkv.adapters.vllm.demo import DemoRow, Turn
from hybridkv.adapters.vllm.demo_engine import NUM_OUTPUT_TOKENS, Answer, Child, ChildEndedError


@pytest.fixture(scope="module")
def rows():
    return demo.run_demo()


def test_the_outputs_are_equal_with_and_without_a_shared_store(rows):
    assert all(row.is_equal for row in rows)
    outputs = [answer.tokens for row in rows for answer in row.shared]
    assert len(outputs) == len(rows) * demo.NUM_CHATS
    assert all(len(set(tokens)) > 1 and len(tokens) == NUM_OUTPUT_TOKENS for tokens in outputs)


def test_what_another_engine_or_request_has_computed_is_loaded(rows):
    cached = [({one.cached for one in row.without}, {one.cached for one in row.shared}) for row in rows]
    first, next_turn, half, turn_after = cached
    assert first == ({0}, {0})
    assert next_turn == ({0}, {1984})  # of the other engine
    assert half == ({0}, {992})  # the engine itself keeps windows at the ends of prompts only
    assert turn_after == ({1984}, {2496})


ANSWER = Answer(tokens=[1, 2], cached=0, first_token_s=0.1)
ROW = DemoRow(
    turn=Turn(what="a prompt", engine=0, prompt=[1] * 1500),
    without=[ANSWER, ANSWER],
    shared=[replace(ANSWER, cached=1472), replace(ANSWER, cached=1440)],
)
WRONG = replace(ROW, shared=[ANSWER, replace(ANSWER, tokens=[1, 3])])


def test_the_table_is_shown_and_equal_outputs_are_a_success(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_demo", lambda: [ROW])
    assert demo.main() == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "a prompt" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "a prompt", "1", "1,500", "0 / 1,440", "100 / 100 ms", "yes",
    ]  # fmt: skip


def test_an_output_that_differs_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_demo", lambda: [ROW, WRONG])
    assert demo.main() == 1
    assert "NO" in capsys.readouterr().out


def end_badly(orders):
    orders.recv()
    raise SystemExit("the reason")


def test_an_engine_that_ends_is_named_with_its_last_words(tmp_path, monkeypatch, capsys):
    def run_demo():
        with Child(tmp_path / "log", end_badly) as child:
            child.ask("anything")

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert demo.main() == 2
    assert "the reason" in capsys.readouterr().err
    with pytest.raises(ChildEndedError, match="last words"):
        run_demo()
