#!/usr/bin/env bash
# NIXL's UCX plugin tells of a parameter `ucx_devices` (getPluginParams) and never reads it: device_list is what
# chooses devices, and takes names without ports (it adds ":1" itself). Unknown names pass without a word.
# An engineer who reads the plugin's own list of parameters sets ucx_devices=mlx5_0:1 and believes in it.
#
# Seen (nixl 1.5.1, nixl-cu12 1.5.1, Linux, no GPU):
#   nixl 1.5.1
#   advertised: num_workers ucx_devices ucx_error_handling_mode
#   {} starts, listeners as without
#   {'ucx_devices': 'no_such_device:1'} starts, listeners as without
#   {'ucx_devices': 'lo'} starts, listeners as without
#   {'no_such_parameter': '1'} starts, listeners as without
#   {'engine_config': 'NET_DEVICES=lo'} starts, listeners on loopback alone
#   {'device_list': 'no_such_device'} refused
# ("listeners": UCX's TCP sockets of the process; on a machine with loopback alone the last-but-one line differs
# from the others only where there is another interface, and the script says so.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.4.6
cat > "$folder/try.py" <<'PY'
import ast, os, sys
from nixl._api import nixl_agent, nixl_agent_config

agent = nixl_agent("one", nixl_agent_config(enable_prog_thread=False, backends=[]))
if len(sys.argv) == 1:
    print("advertised:", *sorted(agent.agent.getPluginParams("UCX")[0]))
    sys.exit()
try:
    agent.create_backend("UCX", ast.literal_eval(sys.argv[1]))
except Exception:
    print("refused")
    sys.exit()
mine = set()
for number in os.listdir("/proc/self/fd"):
    try:
        mine.add(os.readlink(f"/proc/self/fd/{number}"))
    except OSError:
        pass
hosts = set()
for line in open("/proc/self/net/tcp").read().splitlines()[1:]:
    _, local, _, state, *rest = line.split()
    if state == "0A" and f"socket:[{rest[5]}]" in mine:
        hosts.add(local.split(":")[0])
print("starts", *sorted(hosts))
PY
try() { "$folder/venv/bin/python" "$folder/try.py" "$@" 2>/dev/null | grep -E '^(advertised|starts|refused)'; }
echo "nixl $("$folder/venv/bin/python" -m pip list --format=freeze 2>/dev/null | sed -n 's/^nixl==//p')"
advertised=$(try); echo "$advertised"
plain=$(try "{}")
[ "$plain" != "starts 0100007F" ] || echo "(this machine has loopback alone: listeners tell nothing here)"
say() { if [ "$1" = refused ]; then echo refused; elif [ "$1" = "$plain" ]; then echo "starts, listeners as without"; elif [ "$1" = "starts 0100007F" ]; then echo "starts, listeners on loopback alone"; else echo "$1"; fi; }
fault=0
expect() { local got; got=$(say "$(try "$1")"); echo "$1 $got"; [ "$got" = "$2" ] || { echo "  expected: $2"; fault=1; }; }
[ "$advertised" = "advertised: num_workers ucx_devices ucx_error_handling_mode" ] || fault=1
expect "{}" "starts, listeners as without"
expect "{'ucx_devices': 'no_such_device:1'}" "starts, listeners as without"
expect "{'ucx_devices': 'lo'}" "starts, listeners as without"
expect "{'no_such_parameter': '1'}" "starts, listeners as without"
if [ "$plain" != "starts 0100007F" ]; then
  expect "{'engine_config': 'NET_DEVICES=lo'}" "starts, listeners on loopback alone"
fi
expect "{'device_list': 'no_such_device'}" "refused"
exit $fault
