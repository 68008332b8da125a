"""The manifests as they would be applied.

Not here: what must hold of them.
"""

import subprocess
import sys
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent.parent


# An overlay that only the checks render: it has the components that no other overlay has.
OPENINGS = DEPLOY / "check/openings"


def overlays():
    """Everything that a person may apply, the base first, and the overlay of the checks."""
    return [DEPLOY / "base", *sorted(path.parent for path in DEPLOY.glob("overlays/*/kustomization.yaml")), OPENINGS]


def rendered(overlay):
    """All objects of one."""
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"deploy: {overlay.name} cannot be rendered: {done.stderr.strip()}")
    return [one for one in yaml.safe_load_all(done.stdout) if one]
