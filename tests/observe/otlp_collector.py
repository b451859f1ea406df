"""An OpenTelemetry collector: what services export over gRPC, kept."""

import contextlib
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`endpoint` is for --otlp-endpoint."""

    def __init__(self):
        self.requests = []
        self.endpoint = ""

    def Export(self, request, context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def resources(self):
        """What each process that sent something says of itself."""
        return [
            _attributes(spans.resource)
            for request in tuple(self.requests)
            for spans in request.resource_spans
        ]

    def spans(self):
        """(service, span, attributes) of everything that came."""
        return [
            (_attributes(resource_spans.resource)["service.name"], span, _attributes(span))
            for request in tuple(self.requests)
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]


def _attributes(owner):
    values = {item.key: item.value for item in owner.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


@contextlib.contextmanager
def running_collector():
    servicer = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    servicer.endpoint = f"http://localhost:{server.add_insecure_port('localhost:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(0).wait()
