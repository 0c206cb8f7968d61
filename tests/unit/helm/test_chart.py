"""The chart renders, obeys Kubernetes' own schemas, and two releases can share a namespace."""

from __future__ import annotations

import base64
import importlib
from pathlib import Path
from typing import Any

import pytest

from lorafleet.core.tenant import Scope
from lorafleet.registry.keyring import operator_key

yaml = pytest.importorskip("yaml")
helm = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).parents[3] / "helm" / "lorafleet"
KUBERNETES_VERSION = "1.37"


def render(values: dict[str, Any] | None = None, release: str = "lf") -> list[dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values or {})
        texts = chart.render(values or {}, name=release, namespace="models")
    return [
        document
        for path, text in texts.items()
        if not path.endswith("NOTES.txt")
        for document in yaml.safe_load_all(text)
        if document
    ]


def identity(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def pods(documents: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for document in documents:
        kind, name = identity(document)
        if kind in ("Deployment", "StatefulSet"):
            found.append((name, document["spec"]["template"]["spec"]))
        if kind == "RayService":
            cluster = document["spec"]["rayClusterConfig"]
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            found += [(name, group["template"]["spec"]) for group in groups]
    return found


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"redis": {"url": "rediss://redis.example:6380/1"}},
        {"image": {"digest": "sha256:" + "0" * 64}, "gateway": {"replicas": 5}},
        {"blobs": {"existingClaim": "weights"}, "serviceAccountName": "models"},
        {"auth": {"existingSecret": "mine", "requireKeys": True}},
        {"redis": {"url": "redis+sentinel://a:26379,b:26379/main/0"}},
    ],
)
def test_every_object_obeys_the_kubernetes_schema(values: dict[str, Any]) -> None:
    documents = render(values)
    assert len(documents) >= 7
    for document in documents:
        if document["kind"] != "RayService":  # a KubeRay resource; its pods are checked below
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    for name, spec in pods(documents):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)


def test_an_external_redis_replaces_the_bundled_one() -> None:
    documents = render({"redis": {"url": "redis://elsewhere:6379/0"}})
    assert not [d for d in documents if d["metadata"]["name"].endswith("-redis")]
    assert "redis://elsewhere:6379/0" in yaml.safe_dump_all(documents)


def test_the_registry_and_gateway_read_a_key_of_the_secret_that_the_chart_makes() -> None:
    documents = render()
    (secret,) = [d for d in documents if d["kind"] == "Secret"]
    key = base64.b64decode(secret["data"]["operator.key"]).decode()
    assert operator_key(key).scope is Scope.OPERATOR
    for component in ("registry", "gateway"):
        (spec,) = [spec for name, spec in pods(documents) if name == f"lf-{component}"]
        (container,) = spec["containers"]
        assert "--operator-key-file=/operator/operator.key" in container["args"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["operator"] == "/operator"
        (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "operator"]
        assert volume["secret"]["secretName"] == secret["metadata"]["name"]


def test_an_existing_secret_is_used_and_keys_are_asked_for_when_told() -> None:
    documents = render({"auth": {"existingSecret": "mine", "requireKeys": True}})
    assert not [d for d in documents if d["kind"] == "Secret"]
    (spec,) = [spec for name, spec in pods(documents) if name == "lf-gateway"]
    assert "--require-keys" in spec["containers"][0]["args"]
    assert {"secretName": "mine", "defaultMode": 0o440} in [
        volume.get("secret") for volume in spec["volumes"]
    ]


@pytest.mark.parametrize("component", ["registry", "gateway"])
def test_the_processes_take_the_arguments_that_the_chart_gives(component: str) -> None:
    values = {"auth": {"requireKeys": True}, "registry": {"allowSources": ["https://hub.example/"]}}
    (spec,) = [spec for name, spec in pods(render(values)) if name == f"lf-{component}"]
    main = importlib.import_module(f"lorafleet.{component}.__main__")
    main._parse(spec["containers"][0]["args"])


def test_two_releases_in_one_namespace_share_nothing() -> None:
    first = {identity(document) for document in render(release="a")}
    second = {identity(document) for document in render(release="b")}
    assert first.isdisjoint(second)


def test_every_container_states_requests_and_limits_and_drops_privileges() -> None:
    for name, spec in pods(render()):
        for container in spec["containers"]:
            assert container["resources"].keys() >= {"requests", "limits"}, name
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name


def test_services_select_the_pods_of_their_own_component() -> None:
    documents = render()
    labels = [
        document["spec"]["template"]["metadata"]["labels"]
        for document in documents
        if document["kind"] in ("Deployment", "StatefulSet")
    ]
    for document in documents:
        if document["kind"] == "Service":
            selector = document["spec"]["selector"].items()
            assert sum(selector <= pod.items() for pod in labels) == 1, identity(document)


def test_the_serve_application_is_one_that_the_code_builds() -> None:
    (service,) = [document for document in render() if document["kind"] == "RayService"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    build = getattr(importlib.import_module(module), name)
    for argument in application["args"]:
        assert f"`{argument}`" in build.__doc__
    built = build(application["args"])
    assert built._bound_deployment.num_replicas == 2


@pytest.mark.parametrize(
    "values",
    [
        {"gateway": {"replicas": 0}},
        {"gateway": {"port": 70000}},
        {"no_such_value": True},
        {"image": {"digest": "sha256:short"}},
        {"redis": {"url": "http://redis"}},
    ],
)
def test_values_outside_the_schema_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError), helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
