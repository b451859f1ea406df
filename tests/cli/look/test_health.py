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


def test_answers_and_silence(subtests, service, capsys, silent_port):
    for status, code in [(200, 0), (503, 1)]:
        with subtests.test("the answer is shown and is the exit code", status=status, code=code):
            assert run([service(status, b"phase "), "--probe=ready"]) == code
            captured = capsys.readouterr()
            assert (captured.err if code else captured.out) == "phase /ready\n"
    with subtests.test("an answer that is no text is still one"):
        assert run([service(200, b"\xff")]) == 0
        assert run([service(500, b"\xff")]) == 1
    with subtests.test("nobody there is a sentence"):
        capsys.readouterr()
        assert run(["--port=1"]) == 1
        assert capsys.readouterr().err.startswith("http://127.0.0.1:1/live: ")
    for flags in [["--host=bad host"], ["--host=" + "a" * 70 + ".b"], ["--port=70000"]]:
        with subtests.test("an address that is none is a sentence", flags=flags):
            assert run(flags) == 1
            assert capsys.readouterr().err.count("\n") == 1
    with subtests.test("who speaks no http is not well"):
        assert run([f"--port={silent_port}"]) == 1
        assert capsys.readouterr().err.startswith("http://")
