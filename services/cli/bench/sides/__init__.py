"""Whom a load is put on, over gRPC or HTTP."""
