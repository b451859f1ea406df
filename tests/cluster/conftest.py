import pytest

from exactness.checkpoints import tiny_checkpoint
from services.router.ranks.balance import Balance
from services.transfer.sending import transfers
from services.values.errors import ProtocolError


@pytest.fixture(scope="session")
def model_dir():
    """For the router's tokenizer; the fake engine has no model."""
    return tiny_checkpoint()


def _looks_slow(monkeypatch, worker):
    now = Balance.now

    def as_if(balance, rank):
        return now(balance, rank)._replace(tokens_per_s=10.0 if rank.worker == worker else 1e6)

    monkeypatch.setattr(Balance, "now", as_if)


@pytest.fixture
def remote_looks_cheaper(monkeypatch):
    _looks_slow(monkeypatch, "decode-0")


@pytest.fixture
def first_prefill_looks_cheaper(monkeypatch):
    _looks_slow(monkeypatch, "prefill-1")


@pytest.fixture
def refusing(monkeypatch):
    """Return how many tickets were refused, by generation of the prefill ranks that refuse every one."""
    generations, check_ticket = {}, transfers.check_ticket

    def check(ticket, prompt_len, layout, memory, own_generation):
        if own_generation in generations:
            generations[own_generation] += 1
            raise ProtocolError("refused on purpose")
        check_ticket(ticket, prompt_len, layout, memory, own_generation)

    monkeypatch.setattr(transfers, "check_ticket", check)
    return generations
