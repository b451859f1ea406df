from services.engine.sglang.inside.host_states import HostAgent


class Agent:
    """NIXL's, which notes what it is told."""

    name = "a"

    def __init__(self):
        self.told = []

    def register_memory(self, memory, kind):
        self.told.append((memory, kind))
        return "registered"

    def get_xfer_descs(self, rows, kind):
        self.told.append((rows, kind))

    def prep_xfer_dlist(self, peer, rows, kind):
        self.told.append((peer, rows, kind))


def test_on_a_cpu_all_memory_is_the_hosts():
    agent = Agent()
    host = HostAgent(agent)
    assert host.register_memory([1], "VRAM") == "registered"
    host.get_xfer_descs([2], "VRAM")
    host.prep_xfer_dlist("VRAMs", [3], "DRAM")
    assert agent.told == [([1], "DRAM"), ([2], "DRAM"), ("VRAMs", [3], "DRAM")]
    assert host.name == "a"
