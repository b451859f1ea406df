import pytest

from exactness.checkpoints import tiny_checkpoint


@pytest.fixture(scope="session")
def model_dir():
    """For the routers' tokenizer; the fake engine has no model."""
    return tiny_checkpoint()
