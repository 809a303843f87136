"""Makes the schemas in this folder from those that are published; README.md says which.

python make.py jobset jobset.x-k8s.io_jobsets.yaml     needs pyyaml
python make.py skypilot                                needs skypilot
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Parts of a pod that no file of configs/ has, and that take most of the room: anything is let
# through there.
UNUSED = set(
    """
    affinity azureDisk azureFile cephfs cinder coordinator csi dnsConfig envFrom ephemeral
    ephemeralContainers fc flexVolume flocker gitRepo glusterfs hostAliases initContainers iscsi
    lifecycle livenessProbe managedFields photonPersistentDisk portworxVolume projected quobyte rbd
    readinessProbe resourceClaims scaleIO schedulingGates securityContext startupProbe status
    storageos topologySpreadConstraints volumeClaimPolicies vsphereVolume workloadRef
    """.split()
)
WORDS = {"description"} | {
    f"x-kubernetes-{name}" for name in ("list-type", "list-map-keys", "validations", "map-type")
}


def trimmed(schema, is_properties=False):
    """Without descriptions, and without unknown fields: the API server removes them, or refuses
    them where it is asked to."""
    if isinstance(schema, list):
        return [trimmed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if is_properties:
        return {name: {} if name in UNUSED else trimmed(one) for name, one in schema.items()}
    kept = {
        name: trimmed(one, name == "properties")
        for name, one in schema.items()
        if name not in WORDS
    }
    if "x-kubernetes-int-or-string" in kept:
        return {"type": ["integer", "string"]}
    if "properties" in kept:
        kept.setdefault("additionalProperties", False)
    return kept


def write(name, schema):
    (HERE / name).write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")


if sys.argv[1] == "jobset":
    import yaml

    versions = yaml.safe_load(Path(sys.argv[2]).read_text())["spec"]["versions"]
    [schema] = [one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1alpha2"]
    schema = trimmed(schema)
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    write("jobset.json", schema)
else:
    from sky.utils import schemas

    write("skypilot_task.json", schemas.get_task_schema())
    resources = schemas.get_resources_schema()
    for name in ("job_recovery",):  # strict, as on the server
        resources["properties"][name]["anyOf"][1]["additionalProperties"] = False
    write("skypilot_resources.json", resources)
