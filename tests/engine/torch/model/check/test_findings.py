from services.engine.torch.model.check_trial import CheckedRow, Findings


def rows(*errors, begins=(0,), after_singles=False):
    return [CheckedRow(i, error, i in begins, after_singles) for i, error in enumerate(errors)]


def found(*args, half=None, **settings):
    findings = Findings(half)
    findings.add("sequence 'a'", rows(*args, **settings))
    return findings


def test_what_is_a_fault(subtests):
    with subtests.test("the median of what follows a border counts"):
        # One row that chose another expert does not, nor what is far from any border.
        assert not found(1e-6, 1e-6, 0.5, 1e-6, 1e-6).fault
        assert not found(*[1e-6] * 8, 0.5, 0.5, 0.5).fault
        assert found(*[1e-6] * 8, 0.5, 0.5, 0.5, begins=(0, 8)).fault
        assert not found(0.5, 0.5).fault  # too few to tell
    with subtests.test("a fault says where and by how much"):
        fault = found(*[1e-6] * 4, 0.25, 0.25, 0.25, begins=(0, 4)).fault
        assert (
            "off by 2.5e-01 of their size (sequence 'a' from token 4 on), where rounding explains 1e-04"
            in fault
        )
    with subtests.test("what is no number is a fault"):
        assert found(float("nan"), float("nan"), float("nan")).fault
    for error, settings, is_fault in [
        (2e-4, {}, True),
        (2e-4, {"after_singles": True}, False),  # a formula of its own for single tokens
        (6e-3, {"after_singles": True}, True),
        (0.1, {"half": 0.12}, False),
        (0.2, {"half": 0.12}, True),
    ]:
        with subtests.test("what is allowed depends on what was tried", error=error):
            assert bool(found(error, error, error, **settings).fault) == is_fault
    for error, lost, is_blind, is_fault in [
        (1e-6, 0.5, False, False),
        (1e-6, 5e-5, True, False),
        (8e-5, 2e-4, True, True),  # Jamba's state, with weights that hardly heed it
        (8e-5, 0.5, False, False),
    ]:
        with subtests.test("where a lost state is hardly seen only rounding passes", error=error):
            findings = found(error, error, error)
            findings.lose("state", rows(lost, lost, lost))
            assert findings.blind_to == (["state"] if is_blind else [])
            assert bool(findings.fault) == is_fault
