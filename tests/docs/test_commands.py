"""Every block says what it is, and every command line names commands, flags, files and extras that are there."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex

import yaml
from command_lines import wrong
from pages import LANGUAGES, ROOT, all_blocks

from megatron_infer.server import ray_replicas
from megatron_infer.server.server_config import server_config_from


def test_every_block_has_a_language_and_text_is_no_code():
    for block in all_blocks():
        place = f"{block.page}:{block.line}"
        assert block.language in LANGUAGES, f"{place}: {block.language or 'no language'}"
        if block.language == "text":
            found = re.search(r"^(\$ |(megatron-infer|torchrun|python|curl|import|from) \w)", block.text, re.M)
            assert not found, f"{place}: {found[0]}"


def test_command_lines_would_be_taken():
    found = [(block.page, block.line, command) for block in all_blocks() for command in block.commands]
    refused = [(*one, why) for one in found if (why := wrong(one[2])) is not None]
    assert len(found) > 40 and not refused


def manifests(name):
    return list(yaml.safe_load_all((ROOT / "examples" / "kubernetes" / name).read_text(encoding="utf-8")))


def variables_of(services):
    """Those of the variables that Kubernetes gives to pods which name ports of Services by their links."""
    return {
        f"{name.upper().replace('-', '_')}_PORT": f"tcp://10.0.0.7:{one['ports'][0]['port']}"
        for name, one in services.items()
    }


def test_pods_of_the_manifests_run_commands_of_this_package_and_find_each_other():
    made = manifests("replicas.yaml")
    services = {one["metadata"]["name"]: one["spec"] for one in made if one["kind"] == "Service"}
    pods = [one["spec"]["template"] for one in made if one["kind"] == "Deployment"]
    assert len(pods) == 4 and len(services) == 2
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        command = container["command"]
        refused = wrong(shlex.join(command))
        assert refused is None, f"{command}: {refused}"
        assert {mount["name"] for mount in container["volumeMounts"]} <= {one["name"] for one in pod["spec"]["volumes"]}
        server_config_from({}, variables_of(services) if pod["spec"].get("enableServiceLinks", True) else {}, {})
        listens = {"serve": "--port", "coordinator": "--bind"}.get(command[1])
        if listens is not None:
            (port,) = container["ports"]
            assert command[command.index(listens) + 1].rpartition(":")[2] == str(port["containerPort"])
            (service,) = [one for one in services.values() if one["selector"] == pod["metadata"]["labels"]]
            assert service["ports"][0]["targetPort"] == port["name"]
        if "--coordinator" in command:
            host, _, number = command[command.index("--coordinator") + 1].removeprefix("tcp://").partition(":")
            assert services[host]["ports"][0]["port"] == int(number)


def test_service_of_ray_has_what_its_import_path_takes():
    (service,) = manifests("rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    assert builder is ray_replicas.application
    inspect.signature(ray_replicas.serve_application).bind(**application["args"])
