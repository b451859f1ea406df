"""The table of `isthmus index`."""

from services.cli.look.index import format_answer
from services.values.kv import KvPath, KvPathKind
from services.values.rank_reports import RankLoad
from services.wire import convert
from services.wire.isthmus.v1 import common_pb2, generation_pb2


def cells(answer):
    """What stands below `KV by`, rank by rank."""
    _, heading, _, *rows = format_answer(answer).splitlines()
    first, last = heading.index("KV by"), heading.index("note")
    return [row[first:last].strip() for row in rows]


def test_the_rows_of_ranks(subtests):
    with subtests.test("what a rank s kv crosses by is shown"):
        paths = (
            KvPath(KvPathKind.TCP, "inter-node", "tcp/eth0"),
            KvPath(KvPathKind.SHARED_MEMORY, "intra-node", "cma/memory"),
            KvPath(KvPathKind.TCP, "intra-node", "tcp/lo"),
        )
        ranks = [
            generation_pb2.RankStatus(
                rank=common_pb2.RankId(worker="w", rank=number),
                role=common_pb2.ROLE_PREFILL,
                load=convert.load_to_proto(RankLoad(kv_paths=known)),
            )
            for number, known in enumerate(((), paths))
        ]
        assert cells(generation_pb2.ListRanksResponse(ranks=ranks)) == ["", "shared_memory, tcp"]
