"""Whether objects have the form that the API servers of several Kubernetes versions ask for, and resources of others theirs.

Schemas of Kubernetes' own kinds come with the package `kubernetes-validate`; those of others are in deploy/schemas, written from
what their definitions say and closed: a key that is not there is an error. Rules in CEL are not looked at.
"""

import json
from pathlib import Path

import jsonschema
import kubernetes_validate

# The oldest and the newest that the manifests are for, and what lies between.
VERSIONS = ("1.29", "1.31", "1.33", "1.35")

FOLDER = Path(__file__).resolve().parent.parent / "schemas"


def own_schemas():
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        schema = json.loads(path.read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        properties = schema["properties"]
        found[properties["apiVersion"]["const"], properties["kind"]["const"]] = jsonschema.Draft202012Validator(schema)
    return found


def problems(objects, versions=VERSIONS):
    """A line for each object that some version would refuse."""
    schemas = own_schemas()
    for one in objects:
        which = f"{one['kind']} {one['metadata']['name']}"
        own = schemas.get((one["apiVersion"], one["kind"]))
        if own is not None:
            for error in own.iter_errors(one):
                yield f"schema: {which}: {error.json_path}: {error.message}"
            continue
        for version in versions:
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"schema: {which} in Kubernetes {version}: {error.message}"
            except kubernetes_validate.SchemaNotFoundError:
                yield f"schema: {which}: neither Kubernetes {version} nor deploy/schemas knows {one['apiVersion']}"
