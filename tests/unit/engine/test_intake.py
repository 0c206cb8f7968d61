"""The last check of a caller's input before the step thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorafleet.core.errors import InvalidInput
from lorafleet.engine.intake import Intake
from lorafleet.engine.request import Prompt, Request, SamplingParams
from lorafleet.engine.text import TextCodec
from support.adapters import tiny_base
from support.tiny import write_tiny


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    directory: Path = write_tiny(tmp_path_factory.mktemp("intake"))
    return Intake(tiny_base(), TextCodec(directory), 100)


def request(intake: Intake, length: int, max_tokens: int) -> Request:
    prompt, sampling = Prompt(token_ids=[1] * length), SamplingParams(max_tokens=max_tokens)
    return intake.request(prompt, sampling, mix=(), emit=print)


def test_the_three_forms_of_a_prompt_are_tokenized(intake: Intake) -> None:
    assert len(intake.tokenize(Prompt(text="abc"))) == 3
    assert intake.tokenize(Prompt(token_ids=(0, 255))) == [0, 255]
    spoken = intake.tokenize(Prompt(messages=[{"role": "user", "content": "hi"}]))
    assert spoken == intake.tokenize(Prompt(text="user:hi\n"))


@pytest.mark.parametrize("bad", [{"text": ""}, {"token_ids": []}, {"messages": []}])
def test_nothing_is_no_prompt(intake: Intake, bad: dict) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        intake.tokenize(Prompt(**bad))


@pytest.mark.parametrize("token", [-1, 256, 2**40])
def test_ids_outside_the_vocabulary_are_refused(intake: Intake, token: int) -> None:
    with pytest.raises(InvalidInput, match=r"\[0, 256\)"):
        intake.tokenize(Prompt(token_ids=[1, token, 2]))


def test_a_prompt_must_leave_room_for_an_answer(intake: Intake) -> None:
    assert request(intake, 99, 50).sampling.max_tokens == 1
    with pytest.raises(InvalidInput, match=r"100 tokens .* 100"):
        request(intake, 100, 1)


def test_an_answer_is_cut_to_the_room_there_is(intake: Intake) -> None:
    assert request(intake, 10, 5).max_length == 15
    assert request(intake, 10, 10**9).max_length == 100


def test_the_caller_may_change_its_list_afterwards(intake: Intake) -> None:
    ids = [1, 2, 3]
    made = intake.request(Prompt(token_ids=ids), None, mix=(), emit=print)
    ids.clear()
    assert made.tokens == [1, 2, 3]
