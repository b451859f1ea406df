import pytest

from services.engine.torch.model.check.findings import CheckedRow, Findings


def rows(*errors, begins=(0,), after_singles=False):
    return [CheckedRow(i, error, i in begins, after_singles) for i, error in enumerate(errors)]


def found(*args, half=None, **settings):
    findings = Findings(half)
    findings.add("sequence 'a'", rows(*args, **settings))
    return findings


def test_the_median_of_what_follows_a_border_counts():
    """One row that chose another expert does not, nor what is far from any border."""
    assert not found(1e-6, 1e-6, 0.5, 1e-6, 1e-6).fault
    assert not found(*[1e-6] * 8, 0.5, 0.5, 0.5).fault
    assert found(*[1e-6] * 8, 0.5, 0.5, 0.5, begins=(0, 8)).fault
    assert not found(0.5, 0.5).fault  # too few to tell


def test_a_fault_says_where_and_by_how_much():
    fault = found(*[1e-6] * 4, 0.25, 0.25, 0.25, begins=(0, 4)).fault
    assert (
        "off by 2.5e-01 of their size (sequence 'a' from token 4 on), where rounding explains 1e-04" in fault
    )


def test_what_is_no_number_is_a_fault():
    assert found(float("nan"), float("nan"), float("nan")).fault


@pytest.mark.parametrize(
    ("error", "settings", "is_fault"),
    [
        (2e-4, {}, True),
        (2e-4, {"after_singles": True}, False),  # a formula of its own for single tokens
        (6e-3, {"after_singles": True}, True),
        (0.1, {"half": 0.12}, False),
        (0.2, {"half": 0.12}, True),
    ],
)
def test_what_is_allowed_depends_on_what_was_tried(error, settings, is_fault):
    assert bool(found(error, error, error, **settings).fault) == is_fault


@pytest.mark.parametrize(
    ("error", "lost", "is_blind", "is_fault"),
    [
        (1e-6, 0.5, False, False),
        (1e-6, 5e-5, True, False),
        (8e-5, 2e-4, True, True),  # Jamba's state, with weights that hardly heed it
        (8e-5, 0.5, False, False),
    ],
)
def test_where_a_lost_state_is_hardly_seen_only_rounding_passes(error, lost, is_blind, is_fault):
    findings = found(error, error, error)
    findings.lose("state", rows(lost, lost, lost))
    assert findings.blind_to == (["state"] if is_blind else [])
    assert bool(findings.fault) == is_fault
