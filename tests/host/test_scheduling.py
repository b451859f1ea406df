import os
import threading

import pytest

from host.policies import may_choose
from services.host.scheduling import patient_threads

chooses = pytest.mark.skipif(
    not may_choose(), reason="this process may not choose how its threads are scheduled"
)


def policy_of_a_new_thread():
    """And of one that it starts."""
    policies = []

    def look():
        policies.append(os.sched_getscheduler(0))

    def run():
        look()
        second = threading.Thread(target=look)
        second.start()
        second.join()

    first = threading.Thread(target=run)
    first.start()
    first.join()
    return policies


def in_a_thread(work):
    """What a test chooses is that thread's."""
    raised = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@chooses
def test_threads_that_start_within_wait_for_others():
    def work():
        with patient_threads():
            assert policy_of_a_new_thread() == [os.SCHED_BATCH] * 2
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        assert policy_of_a_new_thread() == [os.SCHED_OTHER] * 2
        with pytest.raises(ZeroDivisionError), patient_threads():
            raise ZeroDivisionError
        assert os.sched_getscheduler(0) == os.SCHED_OTHER

    in_a_thread(work)


@chooses
def test_another_policy_stays():
    def work():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with patient_threads():
            assert policy_of_a_new_thread() == [os.SCHED_IDLE] * 2
        assert os.sched_getscheduler(0) == os.SCHED_IDLE

    in_a_thread(work)


def test_where_it_may_not_choose_nothing_changes(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with patient_threads():
        assert policy_of_a_new_thread() == [os.SCHED_OTHER] * 2
