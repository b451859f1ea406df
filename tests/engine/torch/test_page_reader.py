"""Pages through staging memory, from a pool that lies in host memory here: CUDA's stream is a stand-in."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.engine.torch.pools import StagedPages, page_reader
from services.kv.page_digest import differing_pages, digest_of

NUM_PAGES, PAGE_BYTES = 12, 24


class Stream:
    """Copies are there once it was waited for."""

    def __init__(self):
        self.num_waits = 0

    def synchronize(self):
        self.num_waits += 1


@pytest.fixture(scope="module")
def pool():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, generator=generator)


def staged(pool, staging_bytes, stream=None):
    return StagedPages(pool, stream or Stream(), pinned=False, staging_bytes=staging_bytes)


def content_of(pool, pages):
    return [bytes(pool[page].tolist()) for page in pages]


pages_lists = st.lists(st.integers(0, NUM_PAGES - 1), max_size=30)


@given(pages=pages_lists, staging_bytes=st.integers(1, 20 * PAGE_BYTES))
def test_staged_pages_and_their_digests_are_those_of_the_pool(pool, pages, staging_bytes):
    expected = content_of(pool, pages)
    assert [bytes(page) for page in page_reader(pool)(pages)] == expected
    assert [bytes(page) for page in staged(pool, staging_bytes).read(pages)] == expected
    digests = [digest_of(content) for content in page_reader(pool)(pages)]
    read_pages = staged(pool, 5 * PAGE_BYTES).read
    wrong = differing_pages(digests, [pages], lambda units, group: read_pages(units))
    assert wrong == ()


@given(num_pages=st.integers(0, 30), num_staged=st.integers(1, 8))
def test_as_many_as_fit_are_waited_for_together_and_before_they_are_read(pool, num_pages, num_staged):
    stream = Stream()
    reading = staged(pool, num_staged * PAGE_BYTES, stream).read([i % NUM_PAGES for i in range(num_pages)])
    waits = [stream.num_waits for _ in reading]
    assert waits == [1 + i // num_staged for i in range(num_pages)]


def test_neighbours_are_copied_at_once_into_memory_of_the_threads_own(subtests, pool):
    with subtests.test("neighbours are copied at once"), pytest.MonkeyPatch.context() as monkeypatch:
        copied = []
        copy = torch.Tensor.copy_

        def recording(self, source, non_blocking=False):
            copied.append((len(source), non_blocking))
            return copy(self, source)

        monkeypatch.setattr(torch.Tensor, "copy_", recording)
        list(staged(pool, 6 * PAGE_BYTES).read([4, 5, 6, 1, 9, 10, 11, 2]))
        assert copied == [(3, True), (1, True), (2, True), (1, True), (1, True)]
    with subtests.test("a thread keeps its staging memory and shares it with no other"):
        reader = staged(pool, 4 * PAGE_BYTES)
        own = next(reader.read([3]))
        thread = threading.Thread(target=lambda: list(reader.read([7])))
        thread.start()
        thread.join()
        assert [bytes(own)] == content_of(pool, [3])
        list(reader.read([7]))  # of this thread: the same memory
        assert [bytes(own)] == content_of(pool, [7])
    with subtests.test("a page that is larger is staged alone"):
        stream = Stream()
        assert [bytes(page) for page in staged(pool, 1, stream).read([2, 3])] == content_of(pool, [2, 3])
        assert stream.num_waits == 2
