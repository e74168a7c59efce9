"""The table of field cases says what is true."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "field-cases.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TABLE)


def test_every_named_test_exists():
    """A test that the table names is defined in the file that it names."""
    missing = [name for file, name in NAMED if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing
    assert len(NAMED) > 59


def test_every_case_is_in_the_table_once():
    """All 59 cases have one row, and every test of this folder belongs to one."""
    slugs = re.findall(r"^\| (W-[A-Z0-9-]+) \|", TABLE, re.MULTILINE)
    assert len(slugs) == len(set(slugs)) == 59
    here = {
        name
        for file in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"def (test_W_\w+)", file.read_text())
    }
    assert here <= {name for _, name in NAMED}
    slugs_of_tests = {slug for slug in slugs for name in here if name.startswith("test_" + slug.replace("-", "_"))}
    assert len(slugs_of_tests) >= 40


def test_what_has_no_test_has_a_reason():
    """A row without a test says why it is left."""
    for row in re.findall(r"^\| W-.*$", TABLE, re.MULTILINE):
        assert "::" in row or "| left: " in row, row
