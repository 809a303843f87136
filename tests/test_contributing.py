"""What contributors and readers of other languages find is what the project has."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)


def test_the_quick_start_in_spanish_has_the_commands_of_the_readme():
    english, spanish = (
        FENCED.findall((ROOT / page).read_text()) for page in ("README.md", "docs/es/README.md")
    )
    assert len(spanish) >= 5 and [block for block in spanish if block not in english] == []


def test_the_issue_forms_are_forms():
    """As docs.github.com has them: each field has its own id, and says what it is."""
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys(), path
        assert all(field["type"] in ("textarea", "input", "checkboxes") for field in form["body"])
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids) and all(
            field["attributes"]["label"] for field in form["body"]
        )


def test_the_citation_has_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])


def test_types_of_every_module_are_checked():
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    assert not any(
        one.get("ignore_errors") or "fabric_llm" in str(one["module"]) for one in overrides
    )
