"""Whether the program takes what the manifests give it: every command line, with its configuration and environment, is run for real.

Processes are only checked (`--check`), and probes ask where nobody answers. Not here: what can be seen without the program (`policy.py`), and what
the commands of the base do to live processes (`cli/tests/command/probes.rs`).
"""

import os
import subprocess
import tempfile
from pathlib import Path

import policy

# Keys that components set and that no build has yet. One that is known must go from this list.
AWAITED = ()

# What a program that was built without a feature says of its switch. An image has features that the program asked here may lack.
LEFT_OUT = {
    "this program was built without RDMA": "KVFLEET_RDMA__ENABLED",
    "this program was built without the feature `kubernetes`": "KVFLEET_GATEWAY__KUBERNETES__ENABLED",
}

# Nobody answers here.
NOWHERE = "127.0.0.1:1"

FIELDS = {"spec.nodeName": "worker-0", "status.podIP": "10.0.0.7"}


class Program:
    """The binary, which remembers what it was asked: overlays give it the same again and again."""

    def __init__(self, path):
        self.path, self.asked = str(path), {}

    def run(self, args, environment=()):
        key = (tuple(args), tuple(sorted(dict(environment).items())))
        if key not in self.asked:
            clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFLEET_")}
            done = subprocess.run(
                [self.path, *args], env=clean | dict(environment), capture_output=True, text=True, timeout=30, check=False
            )
            self.asked[key] = (done.returncode, (done.stderr or done.stdout).strip())
        return self.asked[key]


def environment_of(container, replica):
    """What the container's variables come to for one replica."""
    found = {}
    for variable in container.get("env", []):
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if field is None:
            found[variable["name"]] = variable.get("value", "")
        else:
            found[variable["name"]] = replica if field == "metadata.name" else FIELDS[field]
    return found


def replicas(one):
    own = one["metadata"]["name"]
    if one["kind"] == "StatefulSet":
        return [f"{own}-{ordinal}" for ordinal in range(one["spec"]["replicas"])]
    return [f"{own}-x7f2q"]


def configurations(program, objects):
    with tempfile.TemporaryDirectory() as folder:
        for one, _, spec in policy.workloads(objects):
            container = spec["containers"][0]
            places = written(objects, spec, Path(folder))
            for replica in replicas(one):
                environment = environment_of(container, replica)
                args = []
                for arg in container["args"]:
                    for name, value in environment.items():
                        arg = arg.replace(f"$({name})", value)
                    args.append(places.get(arg, arg))
                code, said = program.run([*args, "--check"], environment)
                for key in AWAITED:
                    if f"unknown key `{key}`" in said:
                        begin = "KVFLEET_" + key.upper().replace(".", "__") + "__"
                        environment = {name: text for name, text in environment.items() if not name.startswith(begin)}
                        code, said = program.run([*args, "--check"], environment)
                for words, switch in LEFT_OUT.items():
                    if words in said:
                        # All but that one switch.
                        environment = environment | {switch: "false"}
                        code, said = program.run([*args, "--check"], environment)
                if code != 0:
                    yield f"program: {policy.name(one)} as {replica}: {said}"


def written(objects, spec, folder):
    """The files of every ConfigMap that the workload mounts, by where it would find them."""
    found = {}
    maps = {one["metadata"]["name"]: one for one in policy.of_kind(objects, "ConfigMap")}
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for mount in spec["containers"][0].get("volumeMounts", []):
        config = maps.get(volumes.get(mount["name"], {}).get("configMap", {}).get("name"))
        for file, text in (config or {}).get("data", {}).items():
            place = folder / config["metadata"]["name"] / file
            place.parent.mkdir(exist_ok=True)
            place.write_text(text)
            found[f"{mount['mountPath']}/{file}"] = str(place)
    return found


def commands(program, objects):
    for one, _, spec in policy.workloads(objects):
        for container in spec["containers"]:
            hooks = [container.get("lifecycle", {}).get("preStop", {})]
            hooks += [container.get(probe, {}) for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
            for command in (hook.get("exec", {}).get("command") for hook in hooks):
                if not command or "--address" not in command:
                    continue
                args = list(command[1:])
                args[args.index("--address") + 1] = NOWHERE
                code, said = program.run(args)
                # What cannot be parsed is 2; that nobody answers is 1, and the message names who was asked.
                if code != 1 or NOWHERE not in said:
                    yield f"program: {policy.name(one)}: {' '.join(command)}: {said}"


def awaited(program):
    """What is waited for in vain: it is there."""
    for key in AWAITED:
        _, said = program.run(["router", "--check", "--set", f"{key}.listen=127.0.0.1:1"])
        if f"unknown key `{key}`" not in said:
            yield f"program: {key} is known by now: take it from AWAITED in deploy/check/program.py"


def problems(program, objects):
    yield from configurations(program, objects)
    yield from commands(program, objects)
