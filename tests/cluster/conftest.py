import pytest

from checkpoints import tiny_checkpoint


@pytest.fixture(scope="session")
def model_dir():
    """For the router's tokenizer; the fake engine has no model."""
    return tiny_checkpoint()
