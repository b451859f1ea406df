"""The comparison with transformers goes on past a near tie, and still sees what is wrong."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactness.checkpoints import tiny_checkpoint
from exactness.reference import (
    NEAR_TIE,
    check_half_precision,
    count_near_ties,
    forced_gaps,
    forced_logits,
    random_prompt,
    reference_generation,
)

pytestmark = pytest.mark.long

PROMPT, ANSWER, PARTING = random_prompt(60, seed=1), 20, 6


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """(checkpoint, twin): the token that is best at PARTING, and its twin, have one logit always."""
    chosen = reference_generation(tiny_checkpoint(), PROMPT, ANSWER).token_ids[PARTING]
    directory = shutil.copytree(tiny_checkpoint(), tmp_path_factory.mktemp("tied") / "model")
    weights = load_file(directory / "model.safetensors")
    twin = 500
    weights["lm_head.weight"][twin] = weights["lm_head.weight"][chosen]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, twin


@pytest.fixture(scope="module")
def reference(tied):
    return reference_generation(tied[0], PROMPT, ANSWER)


@pytest.fixture(scope="module")
def other_way(tied, reference):
    """What is generated when the other one of the two is chosen."""
    directory, twin = tied
    begun = (*reference.token_ids[:PARTING], twin)
    rest = reference_generation(directory, (*PROMPT, *begun), ANSWER - len(begun)).token_ids
    assert rest != reference.token_ids[PARTING + 1 :]
    return [*begun, *rest]


def test_the_reference_itself_has_no_near_tie_to_pass(reference):
    assert count_near_ties(reference, list(reference.token_ids)) == 0


def test_teacher_forcing_chooses_what_generating_chose(reference, tied):
    logits = forced_logits(tied[0], PROMPT, reference.token_ids)
    assert max(forced_gaps(logits, reference.token_ids)) < NEAR_TIE


def test_past_a_near_tie_the_answer_is_another_and_right(reference, other_way):
    assert reference.generated.gaps[PARTING] < NEAR_TIE
    assert count_near_ties(reference, other_way) <= 1  # either of the two is the argmax of equals


def test_wrong_tokens_are_seen(subtests, reference, other_way):
    for position in [PARTING + 1, ANSWER - 1]:
        with subtests.test("a wrong token past a near tie is seen", position=position):
            wrong = [*other_way]
            wrong[position] = 4 + (wrong[position] + 1) % 500
            with pytest.raises(AssertionError, match=f"token {position} is"):
                count_near_ties(reference, wrong)

    with subtests.test("at a near tie not any token will do"):
        wrong = [*other_way]
        wrong[PARTING] = 4 + (wrong[PARTING] + 7) % 490
        with pytest.raises(AssertionError, match=f"token {PARTING} is"):
            count_near_ties(reference, wrong)

    with subtests.test("an answer that is too short is seen"), pytest.raises(AssertionError):
        count_near_ties(reference, reference.token_ids[:-1])


def test_half_precision_is_bounded_and_not_let_through(subtests):
    for dtype in [torch.bfloat16, torch.float16]:
        with subtests.test(dtype=dtype):
            directory = tiny_checkpoint()
            right = reference_generation(directory, PROMPT, ANSWER).token_ids
            assert check_half_precision(directory, PROMPT, right, dtype) == 0
            wrong = [*right[:9], 4 + (right[9] + 1) % 500, *right[10:]]
            with pytest.raises(AssertionError, match="token 9 is"):
                check_half_precision(directory, PROMPT, wrong, dtype)
