"""Frames as SGLang 0.5.23 writes them, for tests that have no SGLang."""

import struct

import numpy as np

from services.engine.sglang.inside.frames import GUARD


def registration(**changed):
    """As NixlKVManager.build_receiver_registration_message; `f5=...` changes frame 5."""
    body = [
        b"None",
        b"10.0.0.1",
        b"41234",
        b"agent-uuid",
        b"\x00agent metadata\xff",
        struct.pack("<4Q", 4096, 8192, 2**63, 12),
        struct.pack("<2Q", 77, 78),
        b"",
        b"3",
        b"2",
        b"1",
        b"2048",
        b"",
        b"",
        b"",
        b"",
        b"513",
        b"DRAM,DRAM,VRAM,VRAM",
        struct.pack("<4Q", 2048, 2048, 1024, 1024),
        b"",
        struct.pack("<4I", 0, 1, 0, 1),
        b"1",
        b"0",
        b"",
    ]
    for index, frame in changed.items():
        body[int(index[1:])] = frame
    return [GUARD, *body]


def metadata(transfer_id=9, pages=(), aux=b"5", required=1, state=b"", prefix=0, dummy=b"0"):
    """As build_receiver_metadata_message."""
    indices = np.asarray(pages, dtype=np.int32).tobytes()
    numbers = [str(number).encode() for number in (transfer_id, required, prefix)]
    head = [GUARD, numbers[0], b"10.0.0.1", b"41234", b"agent-uuid"]
    return [*head, indices, aux, numbers[1], state, numbers[2], dummy]
