"""The evaluator of network policies.

Run by `scripts/deploy`.
"""

import unittest
from dataclasses import replace

from network import NAMESPACE_NAME, Pod, World


def one_policy(**spec):
    return {"kind": "NetworkPolicy", "metadata": {"name": "one", "namespace": "kvfleet"}, "spec": spec}


class Semantics(unittest.TestCase):
    """The evaluator against what `networking.k8s.io/v1` says."""

    source = Pod("source", "kvfleet", {"app": "source"})
    target = Pod("target", "kvfleet", {"app": "target"}, frozenset([(80, "TCP")]), {("http", "TCP"): 80})
    foreign = Pod("foreign", "there", {"app": "source"})
    address = Pod("address", address="10.1.2.3")
    space = {"kind": "Namespace", "metadata": {"name": "kvfleet"}}

    def reaches(self, *policies, source=None, target=None, port=80, protocol="TCP", namespaces=None):
        world = World([self.space, *policies], namespaces=namespaces)
        return world.may_reach(source or self.source, target or self.target, port, protocol)

    def admits(self, peer, source=None, ports=({"port": 80},), **more):
        rule = {"from": [peer], "ports": list(ports)}
        return self.reaches(one_policy(podSelector={}, policyTypes=["Ingress"], ingress=[rule]), source=source, **more)

    def test_no_policy_opens_and_default_deny_closes(self):
        self.assertTrue(self.reaches())
        for types in (["Ingress"], ["Egress"], ["Ingress", "Egress"]):
            self.assertFalse(self.reaches(one_policy(podSelector={}, policyTypes=types)), types)

    def test_types_follow_from_rules(self):
        self.assertFalse(self.reaches(one_policy(podSelector={"matchLabels": {"app": "target"}})))
        only_egress = one_policy(podSelector={"matchLabels": {"app": "source"}}, egress=[{"ports": [{"port": 81}]}])
        self.assertFalse(self.reaches(only_egress))
        no_egress = one_policy(podSelector={"matchLabels": {"app": "source"}})
        self.assertTrue(self.reaches(no_egress))

    def test_policies_apply_in_their_namespace_only(self):
        closed = one_policy(podSelector={}, policyTypes=["Ingress", "Egress"])
        closed["metadata"]["namespace"] = "there"
        self.assertTrue(self.reaches(closed))
        self.assertFalse(self.reaches(closed, source=self.foreign))

    def test_policies_add_up(self):
        deny = one_policy(podSelector={}, policyTypes=["Ingress"])
        rule = {"from": [{"podSelector": {"matchLabels": {"app": "source"}}}], "ports": [{"port": 80}]}
        self.assertTrue(self.reaches(deny, one_policy(podSelector={}, policyTypes=["Ingress"], ingress=[rule])))

    def test_an_empty_rule_opens_all(self):
        self.assertTrue(self.reaches(one_policy(podSelector={}, policyTypes=["Ingress"], ingress=[{}])))
        self.assertFalse(self.reaches(one_policy(podSelector={}, policyTypes=["Ingress"], ingress=[])))

    def test_a_pod_selector_is_of_the_own_namespace(self):
        peer = {"podSelector": {"matchLabels": {"app": "source"}}}
        self.assertTrue(self.admits(peer))
        self.assertFalse(self.admits(peer, source=self.foreign))
        self.assertFalse(self.admits({"podSelector": {"matchLabels": {"app": "other"}}}))

    def test_a_namespace_is_known_by_its_name(self):
        peer = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "there"}}}
        self.assertTrue(self.admits(peer, source=self.foreign))
        self.assertFalse(self.admits(peer))
        # The name cannot be forged by another label of the namespace.
        liar = Pod("liar", "elsewhere")
        self.assertFalse(self.admits(peer, source=liar, namespaces={"elsewhere": {NAMESPACE_NAME: "there"}}))
        by_label = {"namespaceSelector": {"matchLabels": {"kvfleet.io/gateways": "true"}}}
        self.assertTrue(self.admits(by_label, source=liar, namespaces={"elsewhere": {"kvfleet.io/gateways": "true"}}))

    def test_both_selectors_of_a_peer_must_match(self):
        peer = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "there"}}, "podSelector": {"matchLabels": {"app": "x"}}}
        self.assertFalse(self.admits(peer, source=self.foreign))
        self.assertTrue(self.admits({"namespaceSelector": {}}, source=self.foreign))

    def test_addresses(self):
        self.assertTrue(self.admits({"ipBlock": {"cidr": "10.0.0.0/8"}}, source=self.address))
        self.assertFalse(self.admits({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}, source=self.address))
        self.assertFalse(self.admits({"ipBlock": {"cidr": "fc00::/7"}}, source=self.address))
        self.assertFalse(self.admits({"ipBlock": {"cidr": "10.0.0.0/8"}}))
        self.assertFalse(self.admits({"podSelector": {}}, source=self.address))

    def test_the_network_of_the_machine(self):
        host = replace(self.source, host_network=True, address="10.1.2.3")
        deny = one_policy(podSelector={}, policyTypes=["Ingress", "Egress"])
        # Its own policies do not apply, a label does not select it, and its address does.
        self.assertTrue(self.reaches(deny, source=host, target=host))
        self.assertFalse(self.reaches(deny, source=host))
        self.assertFalse(self.admits({"podSelector": {"matchLabels": {"app": "source"}}}, source=host))
        self.assertTrue(self.admits({"ipBlock": {"cidr": "10.0.0.0/8"}}, source=host))

    def test_ports(self):
        peer = {"podSelector": {}}
        for ports, opened in [
            ([{"port": 80}], True),
            ([{"port": 80, "protocol": "UDP"}], False),
            ([{"port": 81}], False),
            ([{"port": 70, "endPort": 80}], True),
            ([{"port": 70, "endPort": 79}], False),
            ([{"port": "http"}], True),
            ([{"port": "http", "protocol": "UDP"}], False),
            ([{"port": "https"}], False),
            ([{"protocol": "TCP"}], True),
            ([], True),
        ]:
            with self.subTest(ports=ports):
                self.assertEqual(self.admits(peer, ports=ports), opened)

    def test_expressions(self):
        for operator, values, opened in [
            ("In", ["source", "x"], True), ("In", ["x"], False),
            ("NotIn", ["x"], True), ("NotIn", ["source"], False),
            ("Exists", [], True), ("DoesNotExist", [], False),
        ]:
            with self.subTest(operator=operator, values=values):
                one = {"key": "app", "operator": operator, "values": values}
                self.assertEqual(self.admits({"podSelector": {"matchExpressions": [one]}}), opened)
        with self.assertRaises(ValueError):
            self.admits({"podSelector": {"matchExpressions": [{"key": "app", "operator": "Near"}]}})


if __name__ == "__main__":
    unittest.main()
