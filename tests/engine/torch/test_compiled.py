"""Kernels are compiled once: what numba made of them is found again, unless anything of it has changed."""

import logging
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from services.engine.torch import compiled

NUMBERS = np.arange(4, dtype=np.float32)


def twice(numbers):
    return 2 * numbers.sum()


def starts(folder):
    """Call a kernel as a process would that has just been started."""
    dispatcher = njit(twice)
    compiled.keep(dispatcher, twice, folder)
    assert dispatcher(NUMBERS) == 12
    return sum(dispatcher.stats.cache_hits.values()), sum(dispatcher.stats.cache_misses.values())


def test_what_was_compiled_is_found_and_what_is_broken_is_made_anew(subtests, tmp_path_factory, caplog):
    with subtests.test("the next one compiles nothing"):
        tmp_path = tmp_path_factory.mktemp("own")
        assert [starts(tmp_path), starts(tmp_path)] == [(0, 1), (1, 0)]
    for pattern in ["*.nbc", "*.nbi"]:
        with subtests.test("what is broken is compiled anew", pattern=pattern):
            tmp_path = tmp_path_factory.mktemp("own")
            caplog.clear()
            starts(tmp_path)
            for file in tmp_path.rglob(pattern):
                file.write_bytes(file.read_bytes()[:100])
            caplog.set_level(logging.WARNING)
            assert [starts(tmp_path), starts(tmp_path)] == [(0, 1), (1, 0)]
            assert caplog.text.count("kernel_not_read") == 1
    with subtests.test("what cannot be kept is compiled"):
        tmp_path = tmp_path_factory.mktemp("own")
        caplog.clear()
        dispatcher = njit(twice)
        compiled.keep(dispatcher, twice, tmp_path)
        for folder in tmp_path.iterdir():
            folder.rmdir()
        tmp_path.rmdir()
        tmp_path.write_text("no folder")
        assert dispatcher(NUMBERS) == 12
        assert "kernel_not_kept" in caplog.text


def test_two_that_keep_at_once_do_not_take_each_others_code(tmp_path):
    """int16 and uint16 (float16 and bfloat16 to our kernels): code for one takes the other, and errs."""
    signed, unsigned = np.full(4, -1, np.int16), np.full(4, 65535, np.uint16)
    first, second, third = njit(twice), njit(twice), njit(twice)
    for dispatcher in (first, second, third):
        compiled.keep(dispatcher, twice, tmp_path)
        dispatcher._cache._compile_lock = compiled.CompileLock(tmp_path / "turn", patience_s=0.0)
    files, save_data = first._cache._cache_file, first._cache._cache_file._save_data

    def save_late(name, data):
        second._cache._cache_file._load_index = dict  # it looked before the first had written
        assert second(unsigned) == 8 * 65535
        save_data(name, data)

    files._save_data = save_late
    assert first(signed) == -8
    assert third(unsigned) == 8 * 65535
    assert third(signed) == -8


def starting(folder, mark):
    """Run `starts` in a process of its own, and leave a mark when it begins."""
    mark.touch()
    return starts(folder)


def test_of_those_that_start_at_once_one_compiles(tmp_path):
    turn = compiled.CompileLock(turn_of(tmp_path))
    assert not turn.take()
    marks = [tmp_path / "first", tmp_path / "second"]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        others = [executor.submit(starting, tmp_path, mark) for mark in marks]
        until(lambda: all(mark.exists() for mark in marks))
        assert not any(other.done() for other in others)
        turn.end()
        assert sorted(other.result(60) for other in others) == [(0, 1), (1, 0)]


def until(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def turn_of(folder):
    """Return where those that compile `twice` there take turns."""
    dispatcher = njit(twice)
    compiled.keep(dispatcher, twice, folder)
    return dispatcher._cache._compile_lock._path


def test_a_turn_that_takes_too_long_is_not_waited_for(tmp_path, caplog):
    first, second = (compiled.CompileLock(tmp_path / "turn", patience_s=0.1) for _ in range(2))
    assert not first.take() and not first.take()
    assert second.take()
    assert "kernels_turn_not_had" in caplog.text
    second.end()
    first.end()
    assert not second.take()


def test_the_folder_is_one_of_all_sources(subtests, tmp_path_factory):
    for variable in ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"]:
        with (
            subtests.test("the folder is where the operator says", variable=variable),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            tmp_path = tmp_path_factory.mktemp("own")
            monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
            monkeypatch.setenv(variable, str(tmp_path))
            found = compiled.kernels_folder.__wrapped__()
            assert found is not None and tmp_path in found.parents and found.is_dir()
            (tmp_path / "file").touch()
            monkeypatch.setenv(variable, str(tmp_path / "file"))
            assert compiled.kernels_folder.__wrapped__() is None
    with subtests.test("a change of any source is another folder"):
        tmp_path = tmp_path_factory.mktemp("own")
        sources = [tmp_path / "a.py", tmp_path / "b.py"]
        for source in sources:
            source.write_text("x = 1\n")
        digests = [compiled.digest(sources)]
        for source in sources:
            source.write_text("x = 2\n")
            digests.append(compiled.digest(sources))
        assert len(set(digests)) == 3
    with subtests.test("whatever numba compiles is among the sources"):
        texts = {path: path.read_text() for path in Path(compiled.__file__).parent.rglob("*.py")}
        users = {path for path, text in texts.items() if "from numba" in text or "torch.compiled" in text}
        assert len(users) > 4
        assert users <= set(compiled.kernel_sources())
