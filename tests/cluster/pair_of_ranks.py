"""This module has what a router, a decode rank and a prefill rank of a FakeCluster hold for requests and for
each other."""


class Ranks:
    """Of a cluster of one rank each, as they are now."""

    def __init__(self, cluster):
        self.router = cluster.routers[0].generator
        self.decode = cluster.ranks["decode-0/0"].engine
        self.prefill = cluster.ranks["prefill-0/0"].engine

    @property
    def transfers(self):
        return self.prefill.sender._table

    def left(self):
        """What is still held, by name; empty when everything is back."""
        links = self.decode._links
        held = {
            "the router's requests": self.router.num_running,
            "decode's requests": len(self.decode._mailboxes),
            "prefill's requests": len(self.prefill._mailboxes),
            "awaited writers": len(self.decode._quarantines),
            "transfers": self.transfers.open_transfers,
            "watches": sum(len(link._watches) for link in [*links._links.values(), *links._retired]),
            "lost watches": len(links._orphans) + len(links._seekers),
        }
        return {name: number for name, number in held.items() if number}

    def ties(self):
        """Return how many peers each side thinks it has."""
        links = self.decode._links
        return {
            "decode's links": len(links._links) + len(links._retired),
            "prefill's links": len(self.transfers._links),
            "prefill's peers": len(self.transfers._transport._peers),
        }
