"""Every rule refuses a manifest that breaks it: one thing is changed in what is right, and the rule must say so.

Run by `scripts/deploy`, which names the program in KVFLEET_BINARY.
"""

import copy
import os
import unittest

import image
import policy
import program
import schemas
from render import DEPLOY, rendered

GOOD = {name: rendered(DEPLOY / "overlays" / name) for name in ("gateway", "rdma", "dev")}


def get(objects, kind, name):
    return next(one for one in objects if one["kind"] == kind and one["metadata"]["name"].startswith(name))


def router(objects):
    return get(objects, "StatefulSet", "kvfleet-router")["spec"]


def node(objects):
    return get(objects, "DaemonSet", "kvfleet-node")["spec"]


def template(workload):
    return workload["template"]["spec"]


def container(workload):
    return template(workload)["containers"][0]


def config(objects, name, old, new):
    data = get(objects, "ConfigMap", f"kvfleet-{name}")["data"]
    assert old in data[f"{name}.toml"], old
    data[f"{name}.toml"] = data[f"{name}.toml"].replace(old, new)


def replaced(words, old, new):
    assert old in words, old
    words[words.index(old)] = new


def without(objects, kind, name):
    objects.remove(get(objects, kind, name))


# Rule, what the line must hold, and what is changed.
BROKEN = [
    ("services_lead_somewhere", "no container has the port 'controll'",
     lambda all: get(all, "Service", "kvfleet-routers")["spec"]["ports"][0].update(targetPort="controll")),
    ("services_lead_somewhere", "selects nothing",
     lambda all: get(all, "Service", "kvfleet-openai")["spec"]["selector"].update({"app.kubernetes.io/component": "proxy"})),
    ("selectors_match", "its own template", lambda all: router(all)["selector"]["matchLabels"].update(a="b")),
    ("selectors_match", "counts others",
     lambda all: template(router(all))["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(a="b")),
    ("selectors_match", "counts others",
     lambda all: template(router(all))["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
     ["labelSelector"]["matchLabels"].update(a="b")),
    ("selectors_match", "before they are ready",
     lambda all: get(all, "Service", "kvfleet-routers")["spec"].pop("publishNotReadyAddresses")),
    ("selectors_match", "before they are ready", lambda all: get(all, "Service", "kvfleet-routers")["spec"].pop("clusterIP")),
    ("selectors_match", "PodDisruptionBudget kvfleet-router selects nothing",
     lambda all: get(all, "PodDisruptionBudget", "kvfleet")["spec"]["selector"]["matchLabels"].update(a="b")),
    ("monitors_lead_somewhere", "selects nothing",
     lambda all: get(all, "ServiceMonitor", "kvfleet")["spec"]["selector"]["matchLabels"].update(a="b")),
    ("monitors_lead_somewhere", "has no port 'metric'",
     lambda all: get(all, "ServiceMonitor", "kvfleet")["spec"]["endpoints"][0].update(port="metric")),
    ("monitors_lead_somewhere", "no container has the port 'metric'",
     lambda all: get(all, "PodMonitor", "kvfleet")["spec"]["podMetricsEndpoints"][0].update(port="metric")),
    ("probes_ask_the_program", "livenessProbe must run", lambda all: container(router(all)).pop("livenessProbe")),
    ("probes_ask_the_program", "livenessProbe must run",
     lambda all: replaced(container(router(all))["livenessProbe"]["exec"]["command"], "live", "ready")),
    ("probes_ask_the_program", "readinessProbe asks at port 9465",
     lambda all: replaced(container(node(all))["readinessProbe"]["exec"]["command"], "127.0.0.1:9464", "127.0.0.1:9465")),
    ("probes_ask_the_program", "is cut off", lambda all: container(node(all))["readinessProbe"].update(timeoutSeconds=1)),
    ("probes_ask_the_program", "preStop must run", lambda all: container(node(all)).pop("lifecycle")),
    ("probes_ask_the_program", "preStop asks at",
     lambda all: replaced(container(node(all))["lifecycle"]["preStop"]["exec"]["command"], "127.0.0.1:7419", "127.0.0.1:7409")),
    ("grace_is_long_enough", "must be at least 40", lambda all: template(node(all)).update(terminationGracePeriodSeconds=39)),
    ("grace_is_long_enough", "waits 24 s, and must wait 25",
     lambda all: replaced(container(node(all))["lifecycle"]["preStop"]["exec"]["command"], "25s", "24s")),
    ("grace_is_long_enough", "must wait 35",
     lambda all: config(all, "node", "ssd_bytes =", "drain_ms = 30000\nssd_bytes =")),
    ("grace_is_long_enough", "must be at least 160",
     lambda all: replaced(container(router(all))["lifecycle"]["preStop"]["exec"]["command"], "20s", "115s")),
    ("grace_is_long_enough", "must be at least 100: preStop, then the stop with what the gateway has under way",
     lambda all: template(router(all)).update(terminationGracePeriodSeconds=99)),
    ("grace_is_long_enough", "must be at least 130: preStop, then the stop with what the gateway has under way",
     lambda all: container(router(all))["env"].append({"name": "KVFLEET_GATEWAY__OPENAI__DRAIN_MS", "value": "60000"})),
    ("grace_is_long_enough", "must be at least 340",
     lambda all: replaced(container(router(all))["lifecycle"]["preStop"]["exec"]["command"], "60s", "5m")),
    ("ports_are_listened_on", "is in no ConfigMap", lambda all: without(all, "ConfigMap", "kvfleet-node")),
    ("ports_are_listened_on", "data_listen is port 7502", lambda all: config(all, "node", ":7500", ":7502")),
    ("ports_are_listened_on", "names port 9000",
     lambda all: container(router(all))["ports"].append({"name": "x", "containerPort": 9000})),
    ("ports_are_listened_on", "gateway.picker.listen is port 9003",
     lambda all: next(one for one in container(router(all))["env"] if "PICKER" in one["name"]).update(value="0.0.0.0:9003")),
    ("voters_are_the_replicas", "voters are not its replicas", lambda all: router(all).update(replicas=5)),
    ("voters_are_the_replicas", "voters are not its replicas", lambda all: config(all, "router", "router-1.kv", "router-9.kv")),
    ("voters_are_the_replicas", "routers are not the replicas", lambda all: config(all, "node", "router-1.kv", "router-9.kv")),
    ("voters_are_the_replicas", "must be Parallel", lambda all: router(all).pop("podManagementPolicy")),
    ("voters_are_the_replicas", "keeps its majority",
     lambda all: get(all, "PodDisruptionBudget", "kvfleet")["spec"].update(maxUnavailable=2)),
    ("images_are_named", "names no version", lambda all: container(router(all)).update(image="host:5000/kvfleet")),
    ("images_are_named", "names no version", lambda all: container(node(all)).update(image="kvfleet:latest")),
    ("nothing_secret_lies_open", "router.toml holds a secret",
     lambda all: config(all, "router", "log_json", "# -----BEGIN PRIVATE KEY-----\nlog_json")),
    ("nothing_secret_lies_open", "node.toml holds a secret",
     lambda all: config(all, "node", "log_json = true", "log_json = true\ntoken = \"abc\"")),
    ("least_rights", "must not be root", lambda all: template(router(all))["securityContext"].pop("runAsNonRoot")),
    ("least_rights", "must not be root", lambda all: template(router(all))["securityContext"].update(runAsUser=0)),
    ("least_rights", "must not be root",
     lambda all: container(node(all))["securityContext"]["capabilities"].update(add=["SYS_ADMIN"])),
    ("least_rights", "seccompProfile", lambda all: template(node(all))["securityContext"].pop("seccompProfile")),
    ("least_rights", "drop ALL", lambda all: container(node(all))["securityContext"]["capabilities"].pop("drop")),
    ("least_rights", "read-only", lambda all: container(node(all))["securityContext"].pop("readOnlyRootFilesystem")),
    ("least_rights", "read-only", lambda all: container(node(all))["securityContext"].update(allowPrivilegeEscalation=True)),
    ("least_rights", "enableServiceLinks", lambda all: template(node(all)).pop("enableServiceLinks")),
    ("least_rights", "has a token", lambda all: template(node(all)).pop("automountServiceAccountToken")),
    ("one_namespace", "is in the namespace None", lambda all: get(all, "Issuer", "kvfleet-ca")["metadata"].pop("namespace")),
    ("one_namespace", "0 namespaces", lambda all: without(all, "Namespace", "kvfleet")),
    ("one_namespace", "is looked for in default",
     lambda all: get(all, "RoleBinding", "kvfleet")["subjects"][0].update(namespace="default")),
    ("the_namespace_admits_its_own", "volume ssd of the machine",
     lambda all: get(all, "Namespace", "kvfleet")["metadata"]["labels"].update({"pod-security.kubernetes.io/enforce": "baseline"})),
    ("accounts_are_there", "is not among", lambda all: without(all, "ServiceAccount", "kvfleet-node")),
    ("accounts_are_there", "its role is not among", lambda all: without(all, "Role", "kvfleet-router")),
    ("accounts_are_there", "more than look", lambda all: get(all, "Role", "kvfleet")["rules"][0]["verbs"].append("delete")),
    ("resources_are_asked_for", "bound its memory", lambda all: container(router(all))["resources"]["limits"].pop("memory")),
    ("resources_are_asked_for", "hugepages-2Mi asked for",
     lambda all: container(node(all))["resources"]["requests"].update({"hugepages-2Mi": "2Gi"})),
    ("tiers_have_room", "dram_bytes", lambda all: config(all, "node", "dram_bytes = 8589934592", "dram_bytes = 99589934592")),
    ("files_lie_in_volumes", "no such volume", lambda all: template(node(all))["volumes"].pop()),
    ("files_lie_in_volumes", "data_dir", lambda all: config(all, "node", "/var/lib/kvfleet/node", "/var/lib/node")),
    ("files_lie_in_volumes", "tls.ca", lambda all: config(all, "router", "/etc/kvfleet/tls/ca.crt", "/etc/ca.crt")),
    ("files_lie_in_volumes", "API_KEYS_FILE is in no Secret",
     lambda all: next(one for one in container(router(all))["volumeMounts"] if one["name"] == "api-keys").update(mountPath="/keys")),
    ("certificates_name_their_holders", "['kvfleet', 'kvfleet-router']",
     lambda all: get(all, "Certificate", "kvfleet-router")["spec"].update(dnsNames=["kvfleet"])),
    ("certificates_name_their_holders", "['kvfleet', 'kvfleet-node']",
     lambda all: get(all, "Certificate", "kvfleet-node")["spec"].update(dnsNames=["kvfleet", "kvfleet-router"])),
    ("certificates_name_their_holders", "both sides",
     lambda all: get(all, "Certificate", "kvfleet-node")["spec"]["usages"].remove("client auth")),
    ("certificates_name_their_holders", "nobody makes", lambda all: without(all, "Certificate", "kvfleet-node")),
    ("certificates_name_their_holders", "its issuer", lambda all: without(all, "Issuer", "kvfleet-root")),
    ("pools_have_a_picker", "there is no Service", lambda all: without(all, "Service", "kvfleet-picker")),
    ("pools_have_a_picker", "has no port 9003",
     lambda all: get(all, "InferencePool", "kvfleet")["spec"]["endpointPickerRef"]["port"].update(number=9003)),
]


class Policy(unittest.TestCase):
    def test_what_is_right_passes(self):
        for name, objects in GOOD.items():
            self.assertEqual(policy.problems(objects), [], name)

    def test_each_rule_refuses_what_breaks_it(self):
        for rule, text, change in BROKEN:
            with self.subTest(rule=rule, text=text):
                objects = copy.deepcopy(GOOD["gateway"])
                change(objects)
                found = policy.problems(objects)
                said = [line for line in found if line.startswith(f"{rule}: ") and text in line]
                self.assertTrue(said, found)

    def test_no_rule_is_without_a_case(self):
        self.assertEqual({rule.__name__ for rule in policy.RULES}, {rule for rule, _, _ in BROKEN})

    def test_a_volume_must_hold_the_ssd_tier(self):
        objects = copy.deepcopy(GOOD["dev"])
        config(objects, "node", "ssd_bytes = 1073741824", "ssd_bytes = 107374182400")
        self.assertIn("its volume ends at 40Gi", "\n".join(policy.problems(objects)))

    def test_what_baseline_refuses_needs_a_privileged_namespace(self):
        objects = copy.deepcopy(GOOD["dev"])
        self.assertEqual(policy.problems(objects), [])
        template(node(objects))["hostNetwork"] = True
        self.assertIn("hostNetwork", "\n".join(policy.problems(objects)))

    def test_root_without_the_capability_is_refused(self):
        objects = copy.deepcopy(GOOD["rdma"])
        container(node(objects))["securityContext"]["capabilities"].pop("add")
        self.assertIn("must not be root", "\n".join(policy.problems(objects)))


class Schemas(unittest.TestCase):
    def said(self, kind, change, versions=("1.33",)):
        one = copy.deepcopy(get(GOOD["gateway"], kind, "kvfleet"))
        self.assertEqual(list(schemas.problems([one], versions)), [])
        change(one["spec"])
        return "\n".join(schemas.problems([one], versions))

    def test_a_misspelt_key_of_kubernetes_is_refused_by_every_version(self):
        said = self.said("StatefulSet", lambda spec: container(spec).update(resource={}), schemas.VERSIONS)
        for version in schemas.VERSIONS:
            self.assertIn(f"Kubernetes {version}", said)

    def test_resources_of_others_are_closed(self):
        for kind in ("InferencePool", "ServiceMonitor", "PodMonitor", "Certificate", "Issuer"):
            self.assertIn("schema", self.said(kind, lambda spec: spec.update(selektor={})), kind)

    def test_a_pool_has_ports_and_its_picker_one(self):
        self.assertIn("targetPorts", self.said("InferencePool", lambda spec: spec.update(targetPorts=[])))
        self.assertIn("port", self.said("InferencePool", lambda spec: spec["endpointPickerRef"].pop("port")))
        self.assertIn("Fail", self.said("InferencePool", lambda spec: spec["endpointPickerRef"].update(failureMode="Open")))

    def test_a_kind_that_nobody_knows_is_refused(self):
        one = {"apiVersion": "example.org/v1", "kind": "Thing", "metadata": {"name": "x"}}
        self.assertIn("knows example.org/v1", "\n".join(schemas.problems([one], ("1.33",))))


class Program(unittest.TestCase):
    kvfleet = program.Program(os.environ["KVFLEET_BINARY"])

    def said(self, change, overlay="gateway"):
        objects = copy.deepcopy(GOOD[overlay])
        change(objects)
        return "\n".join(program.problems(self.kvfleet, objects))

    def test_what_is_right_is_taken(self):
        for name in GOOD:
            self.assertEqual(self.said(lambda all: None, name), "", name)

    def test_a_misspelt_key_is_refused(self):
        self.assertIn("unknown key `dram_byte`", self.said(lambda all: config(all, "node", "dram_bytes", "dram_byte")))

    def test_a_wrong_value_is_refused(self):
        self.assertIn("profile", self.said(lambda all: config(all, "router", "h100-8b", "h900")))

    def test_a_wrong_variable_is_refused(self):
        wrong = {"name": "KVFLEET_ROUTERS_PORT", "value": "tcp://10.0.0.1:7400"}
        self.assertIn("KVFLEET_ROUTERS_PORT", self.said(lambda all: container(node(all))["env"].append(wrong)))

    def test_a_replica_without_a_vote_is_refused(self):
        self.assertIn("as kvfleet-router-3", self.said(lambda all: router(all).update(replicas=4)))

    def test_a_flag_that_is_none_is_refused(self):
        said = self.said(lambda all: container(router(all))["livenessProbe"]["exec"]["command"].append("--fast"))
        self.assertIn("--fast", said)
        said = self.said(lambda all: container(node(all))["args"].append("--fast"))
        self.assertIn("--fast", said)

    def test_a_gateway_without_keys_is_refused(self):
        def without_keys(all):
            env = container(router(all))["env"]
            env.remove(next(one for one in env if "API_KEYS" in one["name"]))

        self.assertIn("callers need no key", self.said(without_keys))

    def test_draining_for_everybody_is_refused(self):
        self.assertIn("drain_listen", self.said(lambda all: config(all, "node", "127.0.0.1:7419", "0.0.0.0:7419")))


class Image(unittest.TestCase):
    text = (DEPLOY / "image/Dockerfile").read_text()
    others = [(DEPLOY.parent / name).read_text() for name in ("rust-toolchain.toml", "cli/Cargo.toml")]

    def said(self, old, new):
        self.assertIn(old, self.text)
        return "\n".join(image.problems(self.text.replace(old, new), *self.others))

    def test_what_is_right_passes(self):
        self.assertEqual(list(image.problems(self.text, *self.others)), [])

    def test_each_rule_refuses_what_breaks_it(self):
        for old, new, text in [
            ("cc-debian12:nonroot", "cc-debian12", "names no version"),
            ("debian:12.11-slim", "debian:latest", "names no version"),
            ("rust:1.95.0-", "rust:1.94.0-", "another Rust"),
            ("USER 65532:65532", "USER root", "USER must be a number"),
            ("USER 65532:65532", "USER 0", "USER must be a number"),
            ("USER 65532:65532", "", "USER must be a number"),
            ('ENTRYPOINT ["/usr/local/bin/kvfleet"]', 'ENTRYPOINT ["/bin/sh"]', "ENTRYPOINT must be"),
            ("cargo xtask dist", "cargo build --profile dist", "as it is shipped"),
            ("dist --features", "dist --unprofiled --features", "as it is shipped"),
            ("fetch --locked", "fetch", "lock file"),
            ('ARG FEATURES=""', 'ARG FEATURES="rdma,magic"', "magic is no feature"),
            ("target/shipped/kvfleet /out/usr", "target/shipped/kvfleet /other/usr", "is not copied"),
            ("COPY --from=build /out", "ADD /out", "ADD takes"),
        ]:
            with self.subTest(old=old, new=new):
                self.assertIn(text, self.said(old, new))


if __name__ == "__main__":
    unittest.main()
