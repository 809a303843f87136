"""What contributors and readers of other languages find is what the project has."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)


def test_the_quick_start_in_spanish_has_the_commands_of_the_readme():
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/es/README.md")]
    english, spanish = map(FENCED.findall, pages)
    assert len(spanish) >= 5 and set(spanish) <= set(english)


def test_the_issue_forms_are_forms():
    """As docs.github.com has them: each field has its own id, and says what it is."""
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys(), path
        for field in form["body"]:
            assert field["type"] in ("textarea", "input", "checkboxes")
            assert field["attributes"]["label"]
        assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_the_citation_has_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])


def test_types_of_every_module_are_checked():
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    for one in overrides:
        assert not one.get("ignore_errors") and "fabric_llm" not in str(one["module"])
