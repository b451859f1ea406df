"""Who is asked about windows may end without an answer; here a module that does."""

import os

import pytest

from services.engine.sglang.service.launch import window_memory
from services.values.errors import ConfigError, Unavailable


async def test_no_answer(subtests, tmp_path, monkeypatch):
    for code, error in [
        ("import os; os.kill(os.getpid(), 9)", Unavailable),  # memory was short: another start may do
        ("raise KeyError('architectures')", ConfigError),
        ("print('maybe')", ConfigError),
    ]:
        with subtests.test(code=code, error=error):
            (tmp_path / "asked.py").write_text(code)
            monkeypatch.setattr(window_memory, "_MODULE", "asked")
            with pytest.raises(error, match="windows"):
                await window_memory.has_window_memory("m", {**os.environ, "PYTHONPATH": str(tmp_path)})
