"""`isthmus health` against a service that is well, one that is not, and what is no service."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from services.cli.look.health import run


@pytest.fixture
def service():
    """A function that says how the service is; it returns the flag for its port."""

    class Answer(BaseHTTPRequestHandler):
        status, body = 200, b"live"

        def do_GET(self):
            self.send_response(self.status)
            self.end_headers()
            self.wfile.write(self.body + self.path.encode() + b"\n")

        def log_message(self, *args): ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever).start()

    def be(status, body):
        Answer.status, Answer.body = status, body
        return f"--port={server.server_port}"

    yield be
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent_port():
    """Somebody listens there, and does not speak HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"PRI * \xff\xfe\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


@pytest.mark.parametrize("status,code", [(200, 0), (503, 1)])
def test_the_answer_is_shown_and_is_the_exit_code(service, capsys, status, code):
    assert run([service(status, b"phase "), "--probe=ready"]) == code
    captured = capsys.readouterr()
    assert (captured.err if code else captured.out) == "phase /ready\n"


def test_an_answer_that_is_no_text_is_still_one(service):
    assert run([service(200, b"\xff")]) == 0
    assert run([service(500, b"\xff")]) == 1


def test_nobody_there_is_a_sentence(capsys):
    assert run(["--port=1"]) == 1
    assert capsys.readouterr().err.startswith("http://127.0.0.1:1/live: ")


@pytest.mark.parametrize("flags", [["--host=bad host"], ["--host=" + "a" * 70 + ".b"], ["--port=70000"]])
def test_an_address_that_is_none_is_a_sentence(capsys, flags):
    assert run(flags) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_who_speaks_no_http_is_not_well(capsys, silent_port):
    assert run([f"--port={silent_port}"]) == 1
    assert capsys.readouterr().err.startswith("http://")
