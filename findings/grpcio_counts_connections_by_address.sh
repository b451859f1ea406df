#!/usr/bin/env bash
# grpcio's option grpc.max_allowed_incoming_connections bounds the connections of each address that a server listens
# on, not those of the server: with 1, a server at two addresses has two. (So "localhost", which stands for ::1 and
# 127.0.0.1, has twice as many as are allowed.) Above it a connection is closed as soon as it was accepted, without a
# word in gRPC: the client sees UNAVAILABLE, as where nobody listens.
#
# Seen with grpcio 1.85.1 on Python 3.11:
#   grpcio 1.85.1
#   first at 127.0.0.1: OK
#   second at 127.0.0.1: UNAVAILABLE
#   first at 127.0.0.2: OK
#   once the first has left: OK
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grpcio==1.85.1
cat >"$folder/connections.py" <<'PYTHON'
import time
from concurrent import futures

import grpc


def serve():
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(
        futures.ThreadPoolExecutor(4), options=[("grpc.max_allowed_incoming_connections", 1)]
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("S", {"Echo": handler})])
    ports = {host: server.add_insecure_port(f"{host}:0") for host in ("127.0.0.1", "127.0.0.2")}
    server.start()
    return server, ports


def connection(host):
    return grpc.insecure_channel(f"{host}:{ports[host]}", options=[("grpc.use_local_subchannel_pool", 1)])


def asked(channel):
    try:
        channel.unary_unary("/S/Echo")(b"a", timeout=5)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


server, ports = serve()
first, second, elsewhere = connection("127.0.0.1"), connection("127.0.0.1"), connection("127.0.0.2")
told = {
    "first at 127.0.0.1": asked(first),
    "second at 127.0.0.1": asked(second),
    "first at 127.0.0.2": asked(elsewhere),
}
first.close()
deadline = time.monotonic() + 20
while (again := asked(second)) != "OK" and time.monotonic() < deadline:
    time.sleep(0.2)
told["once the first has left"] = again
print("grpcio", grpc.__version__)
for what, code in told.items():
    print(f"{what}: {code}")
server.stop(0)
if list(told.values()) != ["OK", "UNAVAILABLE", "OK", "OK"]:
    raise SystemExit("grpcio behaves otherwise than it did")
PYTHON
"$folder/venv/bin/python" "$folder/connections.py"
