"""Grammars of an SGLang that was started without a tokenizer; tests/sglang has them real."""

from types import SimpleNamespace

import pytest

from services.engine.sglang.inside import grammar_tokenizer


@pytest.fixture
def asked(monkeypatch):
    """The schedulers whose models were to get a backend."""
    schedulers = []

    def backend(scheduler):
        schedulers.append(scheduler)
        if scheduler == "unusable":
            raise ValueError("can't determine decoder type")
        return f"backend of {scheduler}"

    monkeypatch.setattr(grammar_tokenizer, "_backend", backend)
    return schedulers


def test_a_manager_without_a_backend_gets_one(asked):
    manager = SimpleNamespace(grammar_backend=None)
    grammar_tokenizer.give_tokenizer(manager, "this")
    assert manager.grammar_backend == "backend of this"


def test_a_manager_that_has_one_keeps_it(asked):
    manager = SimpleNamespace(grammar_backend="its own")
    grammar_tokenizer.give_tokenizer(manager, "this")
    assert manager.grammar_backend == "its own" and not asked


def test_a_tokenizer_that_cannot_be_used_costs_grammars_and_no_start(asked, caplog):
    manager = SimpleNamespace(grammar_backend=None)
    grammar_tokenizer.give_tokenizer(manager, "unusable")
    assert manager.grammar_backend is None
    assert "sglang_grammars_missing" in caplog.text and "can't determine" in caplog.text
