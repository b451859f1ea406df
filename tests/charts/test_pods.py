"""What the pods promise a cluster: probes, an orderly end, no privileges, room, and who may talk to whom."""

import kubernetes_validate
import pytest

from charts.rendering import COMPONENT, LEAST, RELEASE, SAMPLES, merged, render, rendered

NAMES = ("least", *SAMPLES)
OURS = ("router", "prefill", "decode")
SUPERVISOR_S = 15  # services/rank/main.py: what a supervisor gives a rank beyond the grace


def env_of(container):
    return {env["name"] for env in container["env"]}


@pytest.mark.parametrize("component", OURS)
@pytest.mark.parametrize("name", NAMES)
def test_probes_tell_starting_from_ready_from_alive(name, component):
    container = rendered(name).container(component)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    paths = {}
    for probe in ("startup", "readiness", "liveness"):
        get = container[f"{probe}Probe"]["httpGet"]
        assert ports[get["port"]] == rendered(name).config(component).health_port
        paths[probe] = get["path"]
    assert paths == {"startup": "/startup", "readiness": "/ready", "liveness": "/live"}


@pytest.mark.parametrize("seconds", [5, 7, 900])
def test_a_model_gets_its_time_to_load(seconds):
    probe = render(merged(LEAST, {"decode": {"startupSeconds": seconds}})).container("decode")["startupProbe"]
    assert seconds <= probe["periodSeconds"] * probe["failureThreshold"] < seconds + 5


@pytest.mark.parametrize("seconds", [5, 900])
def test_a_rank_that_is_started_again_gets_no_longer(seconds):
    """Of a container that started once a kubelet never asks /startup again."""
    objects = render(merged(LEAST, {"decode": {"startupSeconds": seconds}}))
    assert objects.config("decode").restart_timeout_s == seconds
    assert objects.config("prefill").restart_timeout_s == 900


@pytest.mark.parametrize("grace_s", [None, 30, 47.5, 600])
@pytest.mark.parametrize("component", OURS)
def test_the_kubelet_waits_longer_than_the_service_does(component, grace_s):
    flags = {} if grace_s is None else {"grace-s": grace_s}
    objects = render(merged(LEAST, {component: {"flags": flags}}))
    pod, config = objects.pods()[component], objects.config(component)
    assert config.grace_s == (30 if grace_s is None else grace_s)
    needed = config.grace_s
    if component == "router":
        stop = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert stop == ["sleep", "5"]
        needed += int(stop[1])
    else:
        needed += SUPERVISOR_S
    assert needed + 5 <= pod["terminationGracePeriodSeconds"] <= needed + 20


@pytest.mark.parametrize("component", OURS)
def test_a_grace_given_to_all_services_counts_for_each_that_has_none_of_its_own(component):
    other = "decode" if component == "router" else "router"
    values = {"flags": {"grace-s": 300}, other: {"flags": {"grace-s": 7}}}
    objects = render(merged(LEAST, values))
    assert objects.config(component).grace_s == 300
    assert objects.pods()[component]["terminationGracePeriodSeconds"] >= 310
    assert objects.config(other).grace_s == 7


@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs_as_root_or_writes_to_its_image(name):
    for component, pod in rendered(name).pods().items():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0, component
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"] + pod.get("initContainers", []):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]
            assert "add" not in own["capabilities"]


@pytest.mark.parametrize("name", NAMES)
def test_every_mount_has_its_volume_and_every_container_a_place_to_write(name):
    objects = rendered(name)
    claims = {item["metadata"]["name"]
              for workload in objects.of("StatefulSet").values()
              for item in workload["spec"].get("volumeClaimTemplates", [])}  # fmt: skip
    for component, pod in objects.pods().items():
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"] + pod.get("initContainers", []):
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert {mount["name"] for mount in mounts.values()} <= volumes | claims
            assert "/tmp" in mounts or component == "etcd"
            for argument in container.get("args", []):
                path = argument.partition("=")[2]
                if path.startswith("/etc/isthmus/"):  # certificates and passwords
                    assert any(path.startswith(f"{mount}/") for mount in mounts), argument
        used = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
        assert volumes <= used, component


@pytest.mark.parametrize("name", NAMES)
def test_requests_and_limits_are_set_everywhere(name):
    for pod in rendered(name).pods().values():
        for container in pod["containers"] + pod.get("initContainers", []):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


def test_gpus_and_rdma_are_asked_for_where_they_are_used():
    objects = rendered("sglang-dp-attention")
    limits = objects.container("decode")["resources"]["limits"]
    assert limits == {"memory": "1024Gi", "nvidia.com/gpu": 8, "rdma/hca_shared_devices": 1}
    assert "nvidia.com/gpu" not in objects.container("router")["resources"]["limits"]
    assert objects.config("decode").device == "cuda"
    assert objects.config("decode").dp_size == 8
    assert "nvidia.com/gpu" not in rendered("least").container("decode")["resources"]["limits"]
    assert rendered("least").config("decode").device == "cpu"
    (shm,) = [v for v in objects.pods()["decode"]["volumes"] if v["name"] == "shared-memory"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_memory_is_locked_only_where_that_is_asked_for():
    device = {"rdma": {"resource": "rdma/hca", "count": 2}}
    asking = {"rdma": {"ipcLock": True}}
    objects = render(merged(LEAST, {"prefill": device, "decode": asking}))
    prefill, decode = objects.container("prefill"), objects.container("decode")
    assert prefill["resources"]["limits"]["rdma/hca"] == 2
    assert prefill["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert decode["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_a_device_for_rdma_is_expected_to_be_used():
    device = {"rdma": {"resource": "rdma/hca"}}
    assert render(merged(LEAST, {"prefill": device})).config("prefill").expect_kv_path == "rdma"
    assert render(LEAST).config("prefill").expect_kv_path == "any"
    assert (
        render(merged(LEAST, {"decode": device})).config("decode").expect_kv_path == "any"
    )  # it writes nothing
    unsure = merged(LEAST, {"prefill": device | {"flags": {"expect-kv-path": "any"}}})
    assert render(unsure).config("prefill").expect_kv_path == "any"
    nixl = {"nixl-parameter": ["ucx_devices=mlx5_0:1,mlx5_1:1"], "nixl-backend": "UCX"}
    objects = render(merged(LEAST, {"prefill": {"flags": nixl}}))
    assert objects.config("prefill").nixl_parameter == ("ucx_devices=mlx5_0:1,mlx5_1:1",)


def test_what_a_gpu_pod_may_need_of_its_node():
    needs = {
        "podSecurityContext": {"runAsUser": 0, "runAsNonRoot": False, "supplementalGroups": [44]},
        "securityContext": {"privileged": True, "readOnlyRootFilesystem": False},
        "runtimeClassName": "nvidia",
        "hostNetwork": True,
        "hostIPC": True,
        "initContainers": [{"name": "wait", "image": "busybox:1.37", "command": ["true"]}],
    }
    values = {"model": {"source": "generated"}, "decode": needs, "networkPolicy": {"enabled": False}}
    objects = render(merged(LEAST, values))
    pod = objects.pods()["decode"]
    assert pod["securityContext"] == {
        "runAsNonRoot": False,
        "runAsUser": 0,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        "supplementalGroups": [44],
    }
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "privileged": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (pod["runtimeClassName"], pod["hostNetwork"], pod["hostIPC"]) == ("nvidia", True, True)
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"  # or the ranks would not find etcd
    assert [c["name"] for c in pod["initContainers"]] == ["make-model", "wait"]
    for key in ("runtimeClassName", "hostNetwork", "hostIPC", "dnsPolicy", "resourceClaims"):
        assert key not in objects.pods()["prefill"], key


def test_gpus_come_by_resource_claims_too():
    claims = [
        {"name": "gpus", "resourceClaimTemplateName": "one-h200"},
        {"name": "nic", "resourceClaimName": "hca"},
    ]
    decode = {"gpus": 1, "gpuResource": "", "resourceClaims": claims}
    objects = render(merged(LEAST, {"decode": decode}))
    pod, container = objects.pods()["decode"], objects.container("decode")
    assert pod["resourceClaims"] == claims
    assert container["resources"]["claims"] == [{"name": "gpus"}, {"name": "nic"}]
    assert container["resources"]["limits"] == {"memory": "8Gi"}
    assert objects.config("decode").device == "cuda"
    assert objects.container("decode")["image"].endswith("-cuda")
    for item in objects.all:
        if item["kind"] == "StatefulSet":  # 1.33 has no claims without its feature gate, but their fields
            kubernetes_validate.validate(item, "1.37", strict=True)


def test_images_are_taken_by_digest_where_one_is_given():
    cuda, own = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
    values = {
        "image": {"repository": "r/i", "digests": {"cuda": cuda}},
        "prefill": {"gpus": 1},
        "decode": {"gpus": 1, "image": {"digest": own}},
        "etcd": {"image": {"digest": own}},
    }
    objects = render(merged(LEAST, values))
    assert objects.container("prefill")["image"] == f"r/i:0.1.0-cuda@{cuda}"
    assert objects.container("decode")["image"] == f"r/i:0.1.0-cuda@{own}"
    assert objects.container("router")["image"] == "r/i:0.1.0-cpu"
    assert objects.container("etcd")["image"].endswith(f":v3.6.6@{own}")


def test_how_pods_are_replaced_is_the_user_s_to_say():
    least = rendered("least").workloads()
    assert least["router"]["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert least["decode"]["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    values = {
        "router": {"updateStrategy": {"rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 1}}},
        "prefill": {"updateStrategy": {"type": "OnDelete"}},
        "decode": {
            "updateStrategy": {"rollingUpdate": {"maxUnavailable": 2, "partition": 3}},
            "podDisruptionBudget": {"maxUnavailable": 2},
        },
    }
    objects = render(merged(LEAST, values))
    workloads = objects.workloads()
    assert workloads["router"]["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": "50%",
        "maxUnavailable": 1,
    }
    assert workloads["prefill"]["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert workloads["decode"]["spec"]["updateStrategy"]["rollingUpdate"] == {
        "maxUnavailable": 2,
        "partition": 3,
    }
    assert objects.of("PodDisruptionBudget")["decode"]["spec"]["maxUnavailable"] == 2
    for item in objects.all:
        if item["kind"] in ("StatefulSet", "Deployment"):
            kubernetes_validate.validate(item, "1.37", strict=True)


def test_each_pod_has_the_image_it_needs():
    def image(name, component):
        return rendered(name).container(component)["image"]

    assert image("least", "router") == image("least", "decode") == "isthmus:0.1.0-cpu"
    assert image("one-node-gpu", "decode") == "isthmus:0.1.0-cuda"
    assert image("one-node-gpu", "router") == image("one-node-gpu", "test") == "isthmus:0.1.0-cpu"
    assert image("sglang-dp-attention", "prefill") == "isthmus:0.1.0-sglang"
    own = {"image": {"repository": "r/i", "tag": "t"}, "decode": {"image": {"tag": "u"}}}
    objects = render(merged(LEAST, own))
    assert objects.container("router")["image"] == "r/i:t"
    assert objects.container("decode")["image"] == "r/i:u"


MODELS = {
    "hostPath": ({"path": "/srv/m"}, {"hostPath": {"path": "/srv/m", "type": "Directory"}}, "/srv/m"),
    "volume": (
        {"path": "/models/a/b", "source": "volume", "volume": {"nfs": {"server": "s", "path": "/x"}}},
        {"nfs": {"server": "s", "path": "/x"}},
        "/models",
    ),
    "volume itself": (
        {"path": "/models", "source": "volume", "volume": {"image": {"reference": "r/weights:1"}}},
        {"image": {"reference": "r/weights:1"}},
        "/models",
    ),
    "image": ({"path": "/opt/m", "source": "image"}, None, None),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("component", OURS)
def test_the_model_comes_from_where_it_is_said_to(case, component):
    model, volume, mounted = MODELS[case]
    pod = render({"model": model}).pods()[component]
    volumes = [v for v in pod["volumes"] if v["name"] == "model"]
    mounts = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "model"]
    assert volumes == ([] if volume is None else [{"name": "model", **volume}])
    assert mounts == ([] if volume is None else [{"name": "model", "mountPath": mounted, "readOnly": True}])


@pytest.mark.parametrize("name", NAMES)
def test_budgets_and_spread_select_exactly_their_pods(name):
    objects = rendered(name)
    for component, workload in objects.workloads().items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        budget = objects.of("PodDisruptionBudget")[component]["spec"]
        assert budget["maxUnavailable"] == 1
        constraints = workload["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert "kubernetes.io/hostname" in {c["topologyKey"] for c in constraints} or name == "production"
        selectors = [budget["selector"], *(c["labelSelector"] for c in constraints)]
        for selector in selectors:
            others = [w for other, w in objects.workloads().items() if other != component]
            assert selector["matchLabels"].items() <= labels.items()
            for other in others:
                their_labels = other["spec"]["template"]["metadata"]["labels"]
                assert not selector["matchLabels"].items() <= their_labels.items()


def test_a_new_chart_version_alone_restarts_no_pod():
    labels = rendered("least").of("StatefulSet")["decode"]["spec"]["template"]["metadata"]["labels"]
    assert not any("version" in key or "chart" in key for key in labels)


def test_routers_scale_with_their_load_and_yield_to_the_autoscaler():
    objects = rendered("least")
    scaler = objects.of("HorizontalPodAutoscaler")["router"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == objects.of("Deployment")["router"]["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 8)
    assert "replicas" not in objects.of("Deployment")["router"]["spec"]
    fixed = render(merged(LEAST, {"router": {"autoscaling": {"enabled": False}}}))
    assert fixed.of("Deployment")["router"]["spec"]["replicas"] == 2
    assert not fixed.of("HorizontalPodAutoscaler")


def test_workers_are_as_many_as_an_autoscaler_says_where_it_does():
    """helm upgrade would set a number back."""
    objects = render(merged(LEAST, {"decode": {"replicas": None}}))
    assert "replicas" not in objects.of("StatefulSet")["decode"]["spec"]
    assert objects.of("StatefulSet")["prefill"]["spec"]["replicas"] == 1
    assert "with 1 prefill and an autoscaler's number of decode worker(s)" in objects.notes


# -- who may talk to whom --------------------------------------------------------------------------------


def allowed(objects, source, target, port):
    """Do the policies let a pod of our component `source` reach `target`'s port? source None: a stranger."""
    labels = {name: w["spec"]["template"]["metadata"]["labels"] for name, w in objects.workloads().items()}
    labels |= {name: pod["metadata"]["labels"] for name, pod in objects.of("Pod").items()}

    def matches(peer, component):
        if component is None or "podSelector" not in peer or "namespaceSelector" in peer:
            return False
        selector = peer["podSelector"]
        wanted = selector.get("matchLabels", {}).items() <= labels[component].items()
        return wanted and all(
            labels[component].get(e["key"]) in e["values"] for e in selector.get("matchExpressions", [])
        )

    def passes(rules, side, component):
        for rule in rules:
            ports = [p["port"] for p in rule.get("ports", [])]
            peers = rule.get(side, [])
            if (not ports or port in ports) and (not peers or any(matches(p, component) for p in peers)):
                return True
        return False

    policies = objects.of("NetworkPolicy")
    enters = passes(policies[target]["spec"]["ingress"], "from", source)
    leaves = source not in policies or passes(policies[source]["spec"]["egress"], "to", target)
    return enters and leaves


@pytest.mark.parametrize("name", ["least", "production"])
def test_policies_let_the_cluster_work(name):
    objects = rendered(name)
    assert set(objects.of("NetworkPolicy")) == {"router", "prefill", "decode", "etcd"}
    for source in OURS:
        assert allowed(objects, source, "etcd", 2379), source
        for target in ("prefill", "decode"):  # KV crosses at ports that UCX chooses
            assert allowed(objects, source, target, 7000) and allowed(objects, source, target, 45678)
    assert allowed(objects, "etcd", "etcd", 2380)
    assert allowed(objects, "test", "router", 7777)
    for target, port in (("router", 8080), ("prefill", 8080), ("decode", 8080), ("etcd", 2381)):
        assert allowed(objects, None, target, port)  # probes


@pytest.mark.parametrize("name", ["least", "production"])
def test_policies_keep_strangers_away(name):
    objects = rendered(name)
    assert not allowed(objects, None, "etcd", 2379)
    assert not allowed(objects, "test", "etcd", 2379)
    assert not allowed(objects, None, "decode", 7000)
    assert not allowed(objects, "etcd", "decode", 7000)
    assert not allowed(objects, "decode", "router", 7777) or name == "least"
    assert not allowed(objects, "router", "etcd", 2380)
    assert allowed(objects, None, "router", 8000) == (name == "least")  # production names its clients
    assert allowed(objects, None, "decode", 9400) == (name == "least")


def test_two_releases_that_are_one_cluster_reach_each_other():
    """Each names the other's pods; the other has its etcd here."""
    peer = {"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "more-decode"}}}
    policies = render(merged(LEAST, {"networkPolicy": {"peers": [peer]}})).of("NetworkPolicy")

    def rules(component, direction, side):
        return [
            rule.get("ports") for rule in policies[component]["spec"][direction] if peer in rule.get(side, [])
        ]

    for component in ("prefill", "decode"):
        assert rules(component, "ingress", "from") == [None]  # every port, for UCX chooses its own
    assert rules("etcd", "ingress", "from") == [[{"port": 2379}]]
    assert rules("router", "ingress", "from") == []
    for component in OURS:
        assert rules(component, "egress", "to") == [None]
    assert rules("etcd", "egress", "to") == []


def test_egress_follows_etcd_and_traces_outside():
    values = {
        "etcd": {"external": {"endpoints": ["a.example:2379", "https://b.example:4001"]}},
        "tracing": {"endpoint": "http://collector:4317"},
    }
    objects = render(merged(LEAST, values))
    for component in OURS:
        egress = objects.of("NetworkPolicy")[component]["spec"]["egress"]
        open_ports = {p["port"] for rule in egress if "to" not in rule for p in rule["ports"]}
        assert open_ports == {53, 2379, 4001, 4317}
    assert "etcd" not in objects.of("NetworkPolicy")
    assert "etcd" not in objects.of("StatefulSet")


def test_addresses_of_ipv6_keep_their_ports_apart():
    values = {
        "etcd": {"external": {"endpoints": ["[fd00::1]:2379", "https://[fd00::2]:4001"]}},
        "tracing": {"endpoint": "http://[fd00::3]:4317"},
    }
    objects = render(merged(LEAST, values))
    assert objects.config("router").etcd == ("[fd00::1]:2379", "https://[fd00::2]:4001")
    egress = objects.of("NetworkPolicy")["router"]["spec"]["egress"]
    assert {p["port"] for rule in egress if "to" not in rule for p in rule["ports"]} == {53, 2379, 4001, 4317}


def test_policies_can_be_left_out():
    assert not render(merged(LEAST, {"networkPolicy": {"enabled": False}})).of("NetworkPolicy")


# -- TLS, etcd's and ours; fronts ------------------------------------------------------------------------


def test_tls_comes_from_secrets_and_reaches_every_service():
    tls = {
        "tls": {"secretName": "ours", "mutual": True, "serverName": "n"},
        "etcd": {"tls": {"secretName": "e"}},
    }
    objects = render(merged(LEAST, tls))
    for component in OURS:
        config = objects.config(component)
        assert config.tls().mutual and config.tls().server_name == "n"
        assert config.etcd_settings().tls is not None
        secrets = {v["secret"]["secretName"] for v in objects.pods()[component]["volumes"] if "secret" in v}
        assert secrets == {"ours", "e"}
        # A kubelet swaps the files of a Secret that is mounted whole; of one mounted by subPath never.
        assert not any("subPath" in mount for mount in objects.container(component)["volumeMounts"])
    assert objects.of("Service")["router"]["spec"]["ports"][1]["appProtocol"] == "https"
    assert "--client-cert-auth=true" in objects.container("etcd")["args"]
    assert "--peer-client-cert-auth=true" in objects.container("etcd")["args"]
    assert {"--tls-cert=/etc/isthmus/tls/tls.crt", "--tls-server-name=n"} <= set(
        objects.container("test")["args"]
    )


def test_a_password_for_etcd_comes_from_a_secret():
    external = {"endpoints": ["e:2379"], "user": "isthmus", "passwordSecret": "etcd-password"}
    objects = render(merged(LEAST, {"etcd": {"external": external}}))
    config = objects.config("decode")
    assert (config.etcd, config.etcd_user) == (("e:2379",), "isthmus")
    assert str(config.etcd_password_file) == "/etc/isthmus/etcd-password/password"


def test_api_keys_come_from_a_secret_to_those_that_need_them():
    objects = render(merged(LEAST, {"router": {"apiKeysSecret": "llm-keys"}}))
    file = "/etc/isthmus/api-keys/keys"
    assert str(objects.config("router").api_key_file) == file
    assert f"--api-key-file={file}" in objects.container("test")["args"]
    for component in ("router", "test", "prefill", "decode"):
        mounts = {m["name"]: m["mountPath"] for m in objects.container(component)["volumeMounts"]}
        secrets = {v["secret"]["secretName"] for v in objects.pods()[component]["volumes"] if "secret" in v}
        is_needed = component in ("router", "test")
        assert secrets == ({"llm-keys"} if is_needed else set())
        assert mounts.get("api-keys") == ("/etc/isthmus/api-keys" if is_needed else None)
    assert rendered("least").config("router").api_key_file is None


def test_fronts_lead_to_the_routers_http_port():
    ingress = {"ingress": {"enabled": True, "host": "llm.example", "tlsSecretName": "web", "className": "c"}}
    spec = render(merged(LEAST, ingress)).of("Ingress")["http"]["spec"]
    (rule,) = spec["rules"]
    assert (rule["host"], spec["tls"][0]["secretName"]) == ("llm.example", "web")
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": f"{RELEASE}-router",
        "port": {"name": "http"},
    }
    route = rendered("production").of("HTTPRoute")["http"]["spec"]
    assert route["rules"][0]["backendRefs"] == [{"name": f"{RELEASE}-router", "port": 8000}]
    assert route["parentRefs"][0]["name"] == "public"
    policy = rendered("production").of("BackendTLSPolicy")["http"]["spec"]
    assert policy["validation"]["hostname"] == rendered("production").config("router").tls_server_name


def test_etcd_keeps_its_data_apart_from_its_pods():
    (claim,) = rendered("least").of("StatefulSet")["etcd"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "8Gi"
    laptop = rendered("laptop")
    assert "volumeClaimTemplates" not in laptop.of("StatefulSet")["etcd"]["spec"]
    assert {"name": "data", "emptyDir": {}} in laptop.pods()["etcd"]["volumes"]
    assert rendered("least").of("StatefulSet")["etcd"]["spec"]["replicas"] == 3


def test_services_select_the_pods_they_name():
    objects = rendered("least")
    for name, service in objects.of("Service").items():
        component = name.removesuffix("-metrics")
        assert service["spec"]["selector"][COMPONENT] == component
        ports = {port["name"] for port in objects.container(component)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert "metrics" not in {p["name"] for p in objects.of("Service")["router"]["spec"]["ports"]}


def test_the_helm_test_is_a_hook_and_runs_once():
    pod = rendered("least").of("Pod")["test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"


def test_what_users_add_is_there():
    extra = {
        "extraEnv": [{"name": "UCX_TLS", "value": "rc,cuda_copy"}],
        "extraVolumes": [{"name": "v", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
        "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "high",
        "affinity": {"nodeAffinity": {}},
    }
    objects = render(merged(LEAST, {component: extra for component in OURS}))
    for component in OURS:
        template = objects.workloads()[component]["spec"]["template"]
        pod = template["spec"]
        assert template["metadata"]["annotations"] == extra["podAnnotations"]
        assert "UCX_TLS" in env_of(pod["containers"][0])
        for key in ("nodeSelector", "tolerations", "priorityClassName", "affinity"):
            assert pod[key] == extra[key]
        assert extra["extraVolumes"][0] in pod["volumes"]
        assert extra["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]
