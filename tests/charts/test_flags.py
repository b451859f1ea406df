"""Values become flags: each container's command line is read by the service's own config code."""

import json
from dataclasses import replace

import pytest

from charts.rendering import CHART, LEAST, NAMES, OURS, merged, render, rendered, sample
from services.engine.sglang.service.sglang_settings import SglangSettings
from services.index.keys import check_name
from services.values.rank import Role


@pytest.mark.parametrize("component", OURS)
@pytest.mark.parametrize("name", NAMES)
def test_each_service_accepts_its_command_line(name, component):
    objects = rendered(name)
    config = objects.config(component)
    assert config.model == sample(name)["model"]["path"] if name != "least" else "/models/m"
    assert (config.host, config.health_port) == ("::", 8080)
    config.etcd_settings()
    config.tls()
    ports = {port["name"]: port["containerPort"] for port in objects.container(component)["ports"]}
    assert ports["health"] == config.health_port
    if component == "router":
        assert (ports["grpc"], ports["http"]) == (config.port, config.http_port)
        assert ports["metrics"] == config.metrics_port
    else:
        assert [ports[f"grpc-{rank}"] for rank in range(config.dp_size)] == [
            config.port + rank for rank in range(config.dp_size)
        ]
        assert ports[f"metrics-{config.dp_size - 1}"] == config.metrics_port + config.dp_size - 1


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("name", NAMES)
def test_engines_accept_their_settings(name, role, tmp_path):
    config = rendered(name).config(role.value)
    if config.engine == "sglang":
        here = replace(config, model=str(tmp_path))  # it must exist
        worker = SglangSettings(here, role, config.worker)
        assert "--enable-dp-attention" in worker.arguments(1)


def test_production_records_one_trace_of_twenty():
    for component in ("router", "prefill", "decode"):
        config = rendered("production").config(component)
        assert (config.trace_sample_ratio, bool(config.otlp_endpoint)) == (0.05, True)


def test_releases_are_clusters_of_their_own():
    """They may share an etcd, where two of one name would register the same ranks, and a Prometheus."""
    for component in OURS:
        assert render(LEAST).config(component).cluster == "llm.isthmus"
        assert render(LEAST, release="isthmus-b").config(component).cluster == "llm.isthmus-b"
        assert render(merged(LEAST, {"flags": {"cluster": "c"}})).config(component).cluster == "c"
    names = [
        render(LEAST, release=release, namespace=namespace).config("router").cluster
        for namespace, release in (("a-isthmus", "isthmus-b"), ("a", "isthmus-isthmus-b"))
    ]
    assert [check_name("cluster", name) for name in names] == ["a-isthmus.isthmus-b", "a.isthmus-isthmus-b"]
    assert "--cluster=llm.isthmus" in render(LEAST).notes


@pytest.mark.parametrize("name", NAMES)
def test_all_services_of_a_release_are_one_cluster(name):
    configs = [rendered(name).config(component) for component in OURS]
    for field in ("etcd", "cluster", "index_block", "served_name", "otlp_endpoint", "tls_server_name"):
        assert len({getattr(config, field) for config in configs}) == 1, field
    router, prefill, _ = configs
    assert router.chunk_size == prefill.chunk_tokens


def test_a_pod_s_rank_is_reached_at_a_name_that_survives_it():
    objects = rendered("least")
    config = objects.config("decode")
    assert config.worker == "isthmus-decode-0"
    assert config.advertise_host == "isthmus-decode-0.isthmus-decode.llm.svc"
    service = objects.of("Service")["decode"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert objects.of("StatefulSet")["decode"]["spec"]["serviceName"] == "isthmus-decode"


def test_values_of_every_kind_reach_the_service():
    flags = {
        "kv-pages": 12_000_000,  # Helm reads it as the float 1.2e+07
        "write-lease-s": 2.5,
        "fence-margin-s": 4,
        "decode-cache": "off",
        "log-level": "debug",
    }
    values = merged(LEAST, {"decode": {"flags": flags}, "router": {"flags": {"plans": ["local", "remote"]}}})
    objects = render(values)
    config = objects.config("decode")
    assert (config.kv_pages, config.write_lease_s, config.fence_margin_s) == (12_000_000, 2.5, 4.0)
    assert (config.decode_cache, config.log_level) == ("off", "debug")
    assert objects.config("prefill").log_level == "info"
    assert objects.config("router").plans == ("local", "remote")


def test_flags_of_all_services_yield_to_a_service_s_own():
    values = merged(LEAST, {"flags": {"log-level": "warning"}, "decode": {"flags": {"log-level": "debug"}}})
    objects = render(values)
    assert [objects.config(c).log_level for c in OURS] == ["warning", "warning", "debug"]


def test_nought_is_a_service_s_own_value_too(chart_copy):
    flags = {"trace-sample-ratio": 0, "grace-s": 0}
    values = merged(LEAST, {"flags": {"trace-sample-ratio": 0.5, "grace-s": 60}, "decode": {"flags": flags}})
    objects = render(values)
    assert [objects.config(c).trace_sample_ratio for c in OURS] == [0.5, 0.5, 0.0]
    assert objects.config("decode").grace_s == 0
    assert objects.pods()["decode"]["terminationGracePeriodSeconds"] == 35

    # No flag of several services is a boolean yet.
    probe = """
{{- $values := mergeOverwrite (deepCopy .Values) (dict "flags" (dict "a" true "b" 7 "c" true)) }}
{{- $root := set (pick . "Release" "Chart") "Values" $values }}
{{- $own := dict "root" $root "values" (dict "flags" (dict "a" false "b" 0)) "own" dict }}
kind: ConfigMap
metadata: {name: probe}
data:
  arguments:
    {{- include "isthmus.arguments" $own | nindent 4 }}
"""
    (chart_copy / "templates" / "probe.yaml").write_text(probe)
    arguments = render(LEAST, chart_copy).of("ConfigMap")["probe"]["data"]["arguments"]
    assert {"--a=false", "--b=0", "--c=true"} <= set(arguments)


def test_engine_arguments_keep_their_commas():
    arguments = ["--tp-size=8", '--json-model-override-args={"a": 1, "b": 2}']
    values = merged(sample("sglang-dp-attention"), {"decode": {"flags": {"engine-arg": arguments}}})
    assert render(values).config("decode").engine_arg == tuple(arguments)


def test_a_null_is_no_flag():
    """Helm takes a default of the chart away for a null, and leaves one over another file of values in."""
    schema = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    owners = {"flags": "commonFlags", "router": "routerFlags", "prefill": "rankFlags", "decode": "rankFlags"}
    nulls = {owner: dict.fromkeys(schema[name]["properties"]) for owner, name in owners.items()}
    for default in ("index-block", "grace-s"):  # of the chart
        del nulls["flags"][default]
    values = {"flags": nulls.pop("flags")} | {owner: {"flags": flags} for owner, flags in nulls.items()}
    assert len(values["decode"]["flags"]) > 40
    for name in ("least", "sglang-dp-attention"):
        given = LEAST if name == "least" else {**sample(name), "router": {}}
        without = {**given, **{role: {**given.get(role, {}), "flags": {}} for role in ("prefill", "decode")}}
        assert render(merged(without, values)).all == render(without).all


def test_no_flag_comes_twice():
    """It would be listed in two places."""
    for name in NAMES:
        for component in OURS:
            names = [text.split("=")[0] for text in rendered(name).arguments(component)]
            assert all(names.count(n) == 1 for n in names if n not in ("--etcd", "--engine-arg", "--plans"))


def test_the_command_of_helm_test_is_accepted():
    from services.cli.look.check import CheckConfig
    from services.settings.flags import load

    for name in NAMES:
        container = rendered(name).container("test")
        assert container["command"] == ["isthmus", "check"]
        config = load(CheckConfig, container["args"])
        assert config.router == "isthmus-router.llm.svc:7777"
        assert (config.tls_ca is not None) == ("tls" in sample(name) if name != "least" else False)


def test_the_model_generated_for_a_trial_is_made_where_it_is_looked_for():
    for component in OURS:
        pod = rendered("laptop").pods()[component]
        (init,) = pod["initContainers"]
        assert init["command"] == ["isthmus", "make-model", "/models/tiny", "--overwrite"]
        assert rendered("laptop").config(component).model == "/models/tiny"
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "model"]
        assert (mount["mountPath"], mount["readOnly"]) == ("/models/tiny", True)
