import pytest

from services.router.dialects.sampling_defaults import SamplingDefaults, defaults_of
from services.values.errors import ConfigError


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"eos_token_id": [1, 2], "max_new_tokens": 5}, SamplingDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},  # Qwen3's
            SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95),
        ),
        ({"do_sample": False, "temperature": 1, "top_p": None}, SamplingDefaults(temperature=1)),
        (
            {"top_k": -1, "min_p": 0.05, "repetition_penalty": 1.05},
            SamplingDefaults(None, None, 0, 0.05, 1.05),
        ),
    ],
)
def test_a_models_own(generation_config, expected):
    assert defaults_of(generation_config) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_p", 0),
        ("min_p", True),
    ],
)
def test_what_cannot_be_sampled_by_is_named(name, value):
    with pytest.raises(ConfigError, match=rf"{name}.*--sampling-defaults=openai"):
        defaults_of({name: value})
