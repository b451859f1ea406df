"""A process of SGLang's end of the socket."""

import select
import socket
import threading

import pytest

from services.engine.sglang.inside.reporter import Reporter
from services.engine.sglang.reports import (
    REPORTS,
    Abort,
    Generate,
    LineSplitter,
    Moved,
    TreeEvents,
    decode,
    encode,
)


@pytest.fixture
def service(tmp_path):
    """(a reporter, the service's end of its socket)"""
    path = str(tmp_path / "reports")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        reporter = Reporter(path)
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(5)
            yield reporter, connection


def received(connection, count):
    splitter, reports = LineSplitter(), []
    while len(reports) < count:
        reports += [decode(line, REPORTS) for line in splitter.feed(connection.recv(1 << 16))]
    return reports


def test_whoever_reports_to_a_service_that_does_not_read_does_not_wait(service):
    reporter, connection = service
    big = TreeEvents(0, [{"token_ids": list(range(200_000))}])
    said = [Moved(1, 1, 1, {}), big, Moved(2, 1, 1, {}), big, *(Moved(n, 1, 1, {}) for n in range(3, 50))]
    for report in said:
        reporter.report(report)  # nobody reads yet
    assert received(connection, len(said)) == said
    while reporter._num_late:  # its thread is about to note that all is written
        pass
    reporter.report(Moved(0, 1, 1, {}))
    assert received(connection, 1) == [Moved(0, 1, 1, {})]


def test_reports_of_several_threads_are_whole(service):
    reporter, connection = service

    def report(thread):
        for number in range(50):
            reporter.report(TreeEvents(thread, [{"number": number, "ids": [0] * 2000}]))

    threads = [threading.Thread(target=report, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    told = received(connection, 200)
    for thread in threads:
        thread.join()
    for number in range(4):
        of_thread = [report.events[0]["number"] for report in told if report.dp_rank == number]
        assert of_thread == list(range(50))


def test_orders_wake_who_polls_and_are_taken_without_waiting(service):
    reporter, connection = service
    assert reporter.orders() == []
    poll = select.poll()
    poll.register(reporter.fileno(), select.POLLIN)
    half, orders = encode(Abort("2")), [Generate({"rid": "1", "input_ids": [5]}), Abort("1")]
    connection.sendall(b"".join(map(encode, orders)) + half[:9])
    assert poll.poll(5000)
    assert reporter.orders() == orders
    assert not poll.poll(0)
    connection.sendall(half[9:])
    assert poll.poll(5000)
    assert reporter.orders() == [Abort("2")]


def test_a_prompt_that_no_socket_holds_is_one_look(service):
    reporter, connection = service
    orders = [Generate({"rid": str(number), "input_ids": list(range(200_000))}) for number in range(2)]
    connection.settimeout(None)
    writing = threading.Thread(target=connection.sendall, args=(b"".join(map(encode, orders)),))
    writing.start()
    poll = select.poll()
    poll.register(reporter.fileno(), select.POLLIN)
    looks, taken = 0, []
    while len(taken) < 2 and poll.poll(5000):
        looks, taken = looks + 1, taken + reporter.orders()
    writing.join()
    assert taken == orders
    assert looks < 10  # one or two, or more where the writer is starved; each part by itself took a dozen


def test_a_service_that_stops_in_an_order_is_waited_for_once(service):
    reporter, connection = service
    waits, poll = [], reporter._poll

    class Poll:
        def poll(self, timeout_ms):
            waits.append(timeout_ms)
            return poll.poll(timeout_ms)

    reporter._poll = Poll()
    line = encode(Abort("1"))
    for part, most in ((line[:5], 1), (b"", 1), (line[5:9], 2), (b"", 2)):
        connection.sendall(part)
        assert reporter.orders() == [] and len(waits) == most
    connection.sendall(line[9:])
    assert reporter.orders() == [Abort("1")] and len(waits) == 2


def test_half_an_order_of_a_service_that_is_gone_is_not_waited_for(service):
    reporter, connection = service
    connection.sendall(encode(Abort("1"))[:9])
    connection.close()
    assert reporter.orders() == []
    assert reporter.orders() == []


def test_after_the_services_end_nothing_comes_and_nothing_fails(service):
    reporter, connection = service
    connection.close()
    assert reporter.orders() == []
    reporter.report(Moved(1, 1, 1, {}))
