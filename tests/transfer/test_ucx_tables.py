"""These tests show by what KV crosses, from UCX's own tables; those over RDMA were not seen here, but made
alike."""

from services.transfer.ucx_tables import UcxTables, kind_of
from services.values.kv import KvPath, KvPathKind

PREFIX = "[1795327206.303543] [vm:7773 :0]   "
SELF = """
+--------+-------------+-----------------------------------+
| isthmus-d4 self cfg#0                                    |
| remote memory write by ucp_put* from host memory to host |
+--------+-------------+-----------------------------------+
| Range  | Description |              Config               |
+--------+-------------+-----------------------------------+
| 0..inf | zero-copy   | cma/memory                        |
+--------+-------------+-----------------------------------+
"""
MESSAGES = """
+-------------+--------------------+---------------------+
| isthmus-d4 intra-node cfg#1                            |
| active message by ucp_am_send*(multi) from host memory |
+-------------+--------------------+---------------------+
|    Range    |    Description     |       Config        |
+-------------+--------------------+---------------------+
|     0..8184 | short              | tcp/lo              |
|  65529..inf | multi-frag copy-in | tcp/lo              |
+-------------+--------------------+---------------------+
"""
OVER_TCP = """
+--------+-------------+------------------------------------------+
| isthmus-d4 intra-node cfg#1                                     |
| remote memory write by ucp_put*(multi) from host memory to host |
+--------+-------------+------------------------------------------+
| Range  | Description |                  Config                  |
+--------+-------------+------------------------------------------+
| 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0        |
+--------+-------------+------------------------------------------+
"""
OVER_RDMA = """
+------------+-------------+--------------------------------------------+
| isthmus-d4 inter-node cfg#2                                           |
| remote memory write by ucp_put*(multi) from cuda/GPU0 memory to cuda  |
+------------+-------------+--------------------------------------------+
|   Range    | Description |                   Config                   |
+------------+-------------+--------------------------------------------+
|    0..2047 | short       | tcp/eth0                                   |
|    2K..inf | zero-copy   | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
+------------+-------------+--------------------------------------------+
"""


def lines(text):
    return [PREFIX + line for line in text.strip().splitlines()]


def test_which_tables_count(subtests):
    with subtests.test("only writes to others count"):
        tables = UcxTables()
        assert tables.feed(lines(SELF) + lines(MESSAGES)) == []
        assert tables.paths("isthmus-d4", 1 << 20) == ()

    with subtests.test("each way once as ucx says it"):
        tables = UcxTables()
        for _ in range(2):
            tables.feed(lines(OVER_TCP) + lines(OVER_RDMA))
        over_tcp = KvPath(KvPathKind.TCP, "intra-node", "52% on tcp/lo and 48% on tcp/eth0")
        over_rdma = KvPath(
            KvPathKind.RDMA, "inter-node", "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"
        )
        assert tables.paths("isthmus-d4", 1 << 20) == (over_tcp, over_rdma)
        assert tables.paths("isthmus-d4", 2047)[1].kind == KvPathKind.TCP  # small pieces go another way
        assert tables.paths("another agent", 1 << 20) == ()

    with subtests.test("a table may come in pieces and other lines are given back"):
        tables = UcxTables()
        text = lines(OVER_TCP)
        assert tables.feed([*text[:4], "[vm:1:0] ib_md.c:1 UCX  ERROR no such device"]) == [
            "[vm:1:0] ib_md.c:1 UCX  ERROR no such device"
        ]
        tables.feed(text[4:])
        assert len(tables.paths("isthmus-d4", 9)) == 1


def test_kinds(subtests):
    for lanes, kind in [
        ("cma/memory", KvPathKind.SHARED_MEMORY),
        ("posix/memory", KvPathKind.SHARED_MEMORY),
        ("cuda_ipc/cuda", KvPathKind.CUDA_IPC),
        ("rc_verbs/mlx5_2:1", KvPathKind.RDMA),
        ("dc_mlx5/mlx5_2:1", KvPathKind.RDMA),
        ("srd/rdmap0s6:1", KvPathKind.RDMA),
        ("tcp/eth0", KvPathKind.TCP),
        ("90% on rc_mlx5/mlx5_0:1 and 10% on tcp/eth0", KvPathKind.TCP),
        ("cuda_copy/cuda and rc_mlx5/mlx5_0:1", KvPathKind.RDMA),
        ("smoke/signals", KvPathKind.UNKNOWN),
        ("", KvPathKind.UNKNOWN),
    ]:
        with subtests.test(lanes=lanes, kind=kind):
            assert kind_of(lanes) is kind
