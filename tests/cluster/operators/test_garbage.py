"""Requests leave next to nothing to a router's garbage collector."""

import gc
from collections import Counter
from contextlib import contextmanager

import pytest

from cluster.harness import FakeCluster, prompt_of

REQUESTS = 20
# What gRPC's own search for a call's handler leaves.
OF_GRPC = {
    "_HandlerCallDetails",
    "_Metadatum",
    "__pyx_scope_struct_35__find_method_handler",
    "cython_function_or_method",
    "tuple",
}


@contextmanager
def garbage():
    """All that within is left in circles."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    left = []
    try:
        yield left
        gc.collect()
        left.extend(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if was_on:
            gc.enable()


@pytest.mark.parametrize("plan", ["remote", pytest.param("local", marks=pytest.mark.long)])
async def test_requests_leave_no_circles_of_ours(etcd_endpoint, model_dir, cluster_name, plan):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, plans=(plan,)) as cluster:
        await cluster.generate(prompt_of(0))  # what is made once
        with garbage() as left:
            for number in range(REQUESTS):
                await cluster.generate(prompt_of(number + 1), conversation_id=str(number))
        kinds = Counter(type(each).__qualname__ for each in left)
        assert {kind for kind, count in kinds.items() if count >= REQUESTS} <= OF_GRPC, kinds
