import pytest

from services.router.text.answer_ends import EndOfSequence, find_end_of_sequence
from services.values.errors import ConfigError

# eos_token_id of generation_config.json and of config.json, the tokenizer's own; which end a generation
CASES = {
    "a list": ([7, 9, 7], 9, 9, (7, 9)),
    "one": (7, 9, 9, (7, 9)),
    "the generation's differ from the config's": ([7], 8, None, (7,)),
    "only the config has some": (None, [8, 9], None, (8, 9)),
    "an empty list": ([], 8, 9, (8, 9)),
    "zero is an id": (0, 8, None, (0,)),
    "only the tokenizer has one": (None, None, 9, (9,)),
    "nobody": (None, None, None, ()),
}


def configs(generation, config):
    return {"generation_config.json": {"eos_token_id": generation}, "config.json": {"eos_token_id": config}}


def test_the_first_file_that_states_some_counts_and_the_tokenizer(subtests):
    for name, (generation, config, tokenizer, expected) in CASES.items():
        with subtests.test(name):
            assert find_end_of_sequence(configs(generation, config), tokenizer).token_ids == expected

    assert find_end_of_sequence(configs([7, 8], 9), 9) == EndOfSequence("generation_config.json", (7, 8), 9)
    assert find_end_of_sequence(configs(None, 9), None) == EndOfSequence("config.json", (9,), None)
    assert find_end_of_sequence({}, 9) == EndOfSequence("", (), 9)

    assert find_end_of_sequence({"config.json": {"text_config": {"eos_token_id": 5}}}, None).token_ids == (5,)


def test_what_is_no_id_is_refused(subtests):
    for value in ["2", 2.0, True, -1, [2, None], {"a": 2}]:
        problem = r"eos_token_id of generation_config\.json is no token id"
        with subtests.test(value=value), pytest.raises(ConfigError, match=problem):
            find_end_of_sequence(configs(value, 8), 9)
