import pytest

from services.router.dialects.sampling import SamplingDefaults, defaults_of
from services.values.errors import ConfigError


def test_a_models_own(subtests):
    for generation_config, expected in [
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
    ]:
        with subtests.test(generation_config=generation_config):
            assert defaults_of(generation_config) == expected
    for name, value in [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_p", 0),
        ("min_p", True),
    ]:
        with (
            subtests.test(name=name),
            pytest.raises(ConfigError, match=rf"{name}.*--sampling-defaults=openai"),
        ):
            defaults_of({name: value})
