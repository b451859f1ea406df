"""The tests that claim exactness must fail when the product is deliberately wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.mutations import MUTATIONS

# Each run imports torch, and compiles a kernel.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

# What must notice each. The fake engine reads every slot of every page; the torch engine is compared
# with transformers, over NIXL.
FAKE_CONVERSATION = "tests/engine/paged/test_pair.py::test_a_conversation_moves_only_its_delta"
TORCH_CONVERSATION = "tests/cluster/test_exact.py::test_over_nixl[16]"
DIGESTS = "tests/engine/paged/test_digests.py::test_every_page_that_moves_is_compared"
PULLS = "tests/engine/paged/test_pulls.py"
TIERS = "tests/engine/paged/core/test_core_tiers.py"
WATCHDOGS = {
    "wrong_page": (FAKE_CONVERSATION, TORCH_CONVERSATION),
    "wrong_page_with_digests": (
        "tests/engine/paged/test_digests.py::test_every_page_that_moves_is_compared",
    ),
    "prefix_off_by_one_page": (FAKE_CONVERSATION, TORCH_CONVERSATION),
    "grant_unlocked": (f"{PULLS}::test_what_is_granted_stays_as_it_is_until_it_was_read",),
    "grant_one_page_more": (f"{PULLS}::test_only_what_is_lacked_crosses",),
    "point_of_another_border": (f"{PULLS}::test_a_hybrid_is_pulled_to_its_deepest_checkpoint",),
    "pull_failed_without_quarantine": (f"{PULLS}::test_a_source_that_writes_late_harms_nobody",),
    "publish_before_landed": (f"{PULLS}::test_what_is_on_its_way_counts_for_nobody",),
    "tier_without_digest": (f"{TIERS}::test_a_slot_that_came_changed_is_computed_instead",),
    "tier_wrong_parent": (f"{TIERS}::test_a_block_is_another_one_behind_another_prefix",),
    "demote_after_eviction": (f"{TIERS}::test_a_page_that_was_evicted_is_copied_no_more",),
    "demote_state_after_eviction": (f"{TIERS}::test_a_state_that_was_evicted_is_copied_no_more",),
    "resume_before_the_state": (f"{TIERS}::test_a_state_that_does_not_come_whole_is_computed",),
    "state_of_another_border": (f"{TIERS}::test_a_state_is_that_of_its_prefix_alone",),
    "ticket_promises_tier": (
        f"{TIERS}::test_who_receives_is_written_to_only_when_its_tier_has_filled_it",
        "tests/engine/paged/core/test_tier_stories.py::test_tiers[a_torn_block]",
    ),
    "fill_where_a_source_writes": (f"{TIERS}::test_whoever_has_no_source_any_more_asks_its_tier",),
    "closure_off": (
        "tests/kv/tiers/test_books.py::test_a_bad_block_takes_its_descendants_along_once_nobody_reads_them",
    ),
    "tier_keeps_its_losses": (f"{TIERS}::test_a_slot_that_came_changed_is_computed_instead",),
    "leaving_writes_without_end": (
        f"{TIERS}::test_a_rank_that_leaves_stores_no_more_than_twice_what_fits_though_requests_go_on",
    ),
    "take_over_evicts_younger": (
        "tests/kv/test_hand_over.py::test_what_comes_displaces_nothing_that_was_used_since",
        "tests/engine/paged/test_take_overs.py::test_nothing_younger_goes_for_it",
    ),
    "stale_generation": ("tests/engine/paged/test_pair.py::test_a_stale_generation_is_refused",),
}


def run_pytest(*arguments):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *arguments,
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)


def test_every_mutation_has_its_watchdog():
    assert WATCHDOGS.keys() == MUTATIONS.keys()
    assert all(WATCHDOGS.values())


def test_the_watchdogs_pass_on_the_real_thing():
    result = run_pytest(*sorted({test for tests in WATCHDOGS.values() for test in tests}))
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", WATCHDOGS)
def test_a_mutation_is_noticed(name):
    """Every watchdog notices it, and not because the mutation, which may be old, breaks by itself."""
    result = run_pytest(f"--mutate={name}", *WATCHDOGS[name])
    assert result.returncode == 1, result.stdout
    assert failed(result) == {*WATCHDOGS[name]}, result.stdout
    assert not re.search(r"^\S*mutations\.py:\d+: \w+", result.stdout, re.MULTILINE), result.stdout


def failed(result):
    """The tests that failed, by pytest's summary, which has a line of its own for each part of one."""
    return {*re.findall(r"^FAILED (\S+)", result.stdout, re.MULTILINE)}
