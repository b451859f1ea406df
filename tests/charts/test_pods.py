"""These tests show what a pod promises its cluster: probes, an orderly end, no privileges, room; its image
and its model."""

import kubernetes_validate
import pytest

from charts.rendering import LEAST, NAMES, OURS, merged, render, rendered

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
        assert config.hand_over_s == 10
        needed += config.hand_over_s + SUPERVISOR_S
    assert needed + 5 <= pod["terminationGracePeriodSeconds"] <= needed + 20


def test_a_worker_that_hands_over_for_longer_or_not_at_all_is_given_the_time():
    objects = render(
        merged(LEAST, {"decode": {"flags": {"hand-over-s": 90}}, "prefill": {"flags": {"hand-over-s": 0}}})
    )
    waits = {name: objects.pods()[name]["terminationGracePeriodSeconds"] for name in ("decode", "prefill")}
    assert waits == {"decode": 30 + 90 + 25, "prefill": 30 + 25}


@pytest.mark.parametrize("component", OURS)
def test_a_grace_given_to_all_services_counts_for_each_that_has_none_of_its_own(component):
    other = "decode" if component == "router" else "router"
    values = {"flags": {"grace-s": 300}, other: {"flags": {"grace-s": 7}}}
    objects = render(merged(LEAST, values))
    assert objects.config(component).grace_s == 300
    assert objects.pods()[component]["terminationGracePeriodSeconds"] >= 310
    assert objects.config(other).grace_s == 7


@pytest.mark.parametrize("name", NAMES)
def test_no_service_is_the_first_process_which_signals_reach_only_once_it_handles_them(name):
    """A pod that was deleted while its Python started went on until its whole grace was over."""
    for component, pod in rendered(name).pods().items():
        assert pod["shareProcessNamespace"] is True, component


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
    nixl = {"nixl-parameter": ["device_list=mlx5_0,mlx5_1"], "nixl-backend": "UCX"}
    objects = render(merged(LEAST, {"prefill": {"flags": nixl}}))
    assert objects.config("prefill").nixl_parameter == ("device_list=mlx5_0,mlx5_1",)


ARBITRARY_USER = {"runAsUser": None, "runAsGroup": None, "fsGroup": None, "fsGroupChangePolicy": None}
OF_OPENSHIFT = {"podSecurityContext": ARBITRARY_USER, "securityContext": {"capabilities": None}}
EVERY_POD = ("router", "prefill", "decode", "etcd", "test")


def test_null_takes_a_key_of_every_pods_security_context_away():
    """OpenShift gives pods users of its own, and refuses those that name another."""
    objects = render(merged(LEAST, {component: OF_OPENSHIFT for component in EVERY_POD}))
    for component in EVERY_POD:
        pod, container = objects.pods()[component], objects.container(component)
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
        }


def test_the_test_pod_goes_where_it_may():
    where = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "t", "operator": "Exists"}]}
    pod = render(merged(LEAST, {"test": where})).pods()["test"]
    assert {name: pod[name] for name in where} == where
    assert "nodeSelector" not in rendered("least").pods()["test"]


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


VOLUMES = {
    "emptyDir": ({}, {"emptyDir": {"medium": "", "sizeLimit": "2306868Mi"}}),
    "hostPath": ({"path": "/nvme/isthmus"}, {"hostPath": {"path": "/nvme/isthmus", "type": "Directory"}}),
    "claim": ({"claimName": "tiers"}, {"persistentVolumeClaim": {"claimName": "tiers"}}),
}


def tiers_of(objects, component="decode"):
    """(where, bytes) of each, as the rank reads its command line."""
    places = objects.config(component).tiers.places
    return [(str(place.directory or "memory"), place.size_bytes) for place in places]


def valid(objects):
    for item in objects.all:
        if item["kind"] == "StatefulSet":
            kubernetes_validate.validate(item, "1.37", strict=True)
    return True


@pytest.mark.parametrize("volume", VOLUMES)
def test_a_tier_in_files_has_its_volume_and_each_rank_the_same_name_again(volume):
    given, expected = VOLUMES[volume]
    decode = {"dpSize": 2, "tiers": {"file": {"size": "1TiB", "volume": volume, **given}}}
    objects = render(merged(LEAST, {"decode": decode}))
    pod, container = objects.pods()["decode"], objects.container("decode")
    (found,) = [each for each in pod["volumes"] if each["name"] == "tier"]
    assert found == {"name": "tier", **expected} and valid(objects)
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "tier"]
    assert mount == {"name": "tier", "mountPath": "/var/lib/isthmus/tier"}
    # Two releases may share a directory; the next life of a worker finds what the last one had.
    assert tiers_of(objects) == [("/var/lib/isthmus/tier/llm.isthmus", 1 << 40)]
    assert objects.config("decode").worker == "isthmus-decode-0"
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == 10001
    assert container["resources"]["limits"]["memory"] == "8Gi"
    assert "volumeClaimTemplates" not in objects.of("StatefulSet")["decode"]["spec"]
    assert not tiers_of(objects, "prefill")
    assert not [each for each in objects.pods()["prefill"]["volumes"] if each["name"] == "tier"]


def test_a_claim_for_tiers_goes_with_its_pod():
    file = {"size": "100GiB", "volume": "claimTemplate", "storageClassName": "fast"}
    objects = render(merged(LEAST, {"prefill": {"dpSize": 2, "tiers": {"file": file}}}))
    spec = objects.of("StatefulSet")["prefill"]["spec"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Delete"}
    (claim,) = spec["volumeClaimTemplates"]
    assert claim == {
        "metadata": {"name": "tier"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast",
            "resources": {"requests": {"storage": "225280Mi"}},
        },
    }
    assert valid(objects) and not [v for v in objects.pods()["prefill"]["volumes"] if v["name"] == "tier"]


def test_what_tiers_take_of_memory_is_asked_for():
    in_memory = {"file": {"size": "512MiB", "medium": "Memory"}, "memory": "20GiB"}
    limits = {"requests": {"memory": "4Gi"}, "limits": {"memory": 8 * 10**9}}
    values = {
        "prefill": {"gpus": 1, "tiers": {"memory": "20GiB"}, "resources": {"limits": {"memory": None}}},
        "decode": {"dpSize": 2, "tiers": in_memory, "resources": limits},
    }
    objects = render(merged(LEAST, values))
    prefill, decode = (objects.container(name)["resources"] for name in ("prefill", "decode"))
    assert prefill["requests"]["memory"] == f"{24 * 1024}Mi" and "memory" not in prefill.get("limits", {})
    assert decode["requests"]["memory"] == f"{(4 + 41) * 1024}Mi"
    assert decode["limits"]["memory"] == f"{41 * 1024 + -(-8 * 10**9 // 2**20)}Mi"
    (tier,) = [each for each in objects.pods()["decode"]["volumes"] if each["name"] == "tier"]
    assert tier["emptyDir"] == {"medium": "Memory", "sizeLimit": "1127Mi"}
    assert tiers_of(objects)[0] == ("memory", 20 << 30) and valid(objects)


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


def test_etcd_keeps_its_data_apart_from_its_pods():
    (claim,) = rendered("least").of("StatefulSet")["etcd"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "8Gi"
    laptop = rendered("laptop")
    assert "volumeClaimTemplates" not in laptop.of("StatefulSet")["etcd"]["spec"]
    assert {"name": "data", "emptyDir": {}} in laptop.pods()["etcd"]["volumes"]
    assert rendered("least").of("StatefulSet")["etcd"]["spec"]["replicas"] == 3


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
