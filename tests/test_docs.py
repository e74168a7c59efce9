"""The documents say what is true now."""

from __future__ import annotations

import re
from pathlib import Path

from moriio_vllm.config import config_table

ROOT = Path(__file__).parents[1]


def test_the_readme_lists_the_keys_that_exist() -> None:
    """The configuration table of the README is the one that the code generates."""
    text = (ROOT / "README.md").read_text()
    between = text.split("<!-- config:begin -->\n")[1].split("<!-- config:end -->")[0]
    assert between == config_table()


def test_links_and_paths_of_the_documents_exist() -> None:
    """Every relative link in README and docs leads to a file."""
    missing = []
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "specs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            if not (document.parent / target).exists():
                missing.append(f"{document.relative_to(ROOT)}: {target}")
    assert not missing
