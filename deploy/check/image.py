"""What must hold of the image's recipe, which nothing here can build."""

import re
import tomllib

PROGRAM = "/usr/local/bin/kvfleet"


def stages(text):
    """Lines of each stage, continued lines joined."""
    found = []
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in (line.strip() for line in joined.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("FROM "):
            found.append([])
        if found:
            found[-1].append(line)
    return found


def problems(text, toolchain, manifest):
    """A line for each thing that is wrong. `toolchain` and `manifest` are the texts of rust-toolchain.toml and cli/Cargo.toml."""
    every = stages(text)
    names = [stage[0].split()[3] for stage in every if len(stage[0].split()) > 3]
    for stage in every:
        image = stage[0].split()[1]
        tag = image.rpartition("/")[2].partition(":")[2]
        if image not in names and tag in ("", "latest"):
            yield f"image: {image} names no version"
    channel = tomllib.loads(toolchain)["toolchain"]["channel"]
    if not every[0][0].split()[1].startswith(f"rust:{channel}-"):
        yield f"image: it is built with another Rust than {channel}, which rust-toolchain.toml names"
    build = " ".join(every[0])
    package = tomllib.loads(manifest)["package"]["name"]
    if "&& cargo xtask dist " not in build or "target/shipped/kvfleet" not in build or "--unprofiled" in build:
        yield "image: the build does not make kvfleet as it is shipped, with `cargo xtask dist`"
    if "cargo fetch --locked" not in build:
        yield "image: the build does not hold to the lock file"
    known = tomllib.loads(manifest).get("features", {})
    for feature in re.findall(r'ARG FEATURES="([^"]*)"', build):
        for one in feature.replace(",", " ").split():
            if one not in known:
                yield f"image: {one} is no feature of {package}"
    for stage in every[1:]:
        which = stage[0].split()[1]
        users = [line.split()[1] for line in stage if line.startswith("USER ")]
        if not users or not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]):
            yield f"image: {which}: USER must be a number, and not root's"
        if f'ENTRYPOINT ["{PROGRAM}"]' not in stage:
            yield f"image: {which}: ENTRYPOINT must be {PROGRAM}"
        copied = [line.split() for line in stage if line.startswith("COPY --from=build ")]
        if not any(words[3] == PROGRAM and words[2] == f"/out{PROGRAM}" and words[2] in build for words in copied):
            yield f"image: {which}: {PROGRAM} is not copied from where the build leaves it"
        if any(line.startswith("ADD ") for line in stage):
            yield f"image: {which}: ADD takes what nobody checked"
