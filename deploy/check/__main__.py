"""Renders every overlay and holds it against the schemas, the rules and the program. `scripts/deploy` calls it.

    python deploy/check PATH_OF_KVFLEET
"""

import sys
from pathlib import Path

import image
import network
import policy
import program
import schemas
from render import DEPLOY, overlays, rendered


def main(binary):
    found, kvfleet = [], program.Program(binary)
    top = DEPLOY.parent
    texts = [path.read_text() for path in (DEPLOY / "image/Dockerfile", top / "rust-toolchain.toml", top / "cli/Cargo.toml")]
    found += [*image.problems(*texts), *program.awaited(kvfleet)]
    for overlay in overlays():
        objects = rendered(overlay)
        lines = [*schemas.problems(objects), *policy.problems(objects), *network.problems(objects), *program.problems(kvfleet, objects)]
        print(f"deploy: {overlay.name}: {len(objects)} objects, {len(lines)} problems")
        found += [f"{overlay.name}: {line}" for line in lines]
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
