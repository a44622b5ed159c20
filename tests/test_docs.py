"""Every Python block of the README and of the docs runs, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import desugar
import subclasses
from docs.blocks import compare_outputs, refresh_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_prints_what_it_shows(page, tmp_path):
    for shown in compare_outputs(page, tmp_path):
        assert shown.agrees(), (
            f"{page.name}:{shown.block.first} shows\n{shown.want}\nbut this is printed:\n{shown.got}\n"
            "If the new output is right, `make readme` puts it there."
        )


def test_the_reference_lists_all_that_is_public():
    text = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"auto\w+:: (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted([*subclasses.__all__, *desugar.__all__])


# ---- the runner itself -------------------------------------------------------------------------------------

PAGE = """A page.

```python
x = 2
print(x, "and more")
```

<!-- output -->
```text
2 ...
```

```sh
not Python
```

```python
print(x + 1)
```

<!-- output -->
```text
4
```
"""


@pytest.fixture
def page(tmp_path):
    """A page whose first output agrees and whose second is stale."""
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_stale_output_is_found(page, tmp_path):
    assert [shown.agrees() for shown in compare_outputs(page, tmp_path)] == [True, False]


def test_stale_output_is_refreshed_and_the_rest_is_left(page, tmp_path):
    assert refresh_page(page, tmp_path) == 1
    assert page.read_text() == PAGE.replace("4\n", "3\n")


def test_an_error_names_the_line_of_the_page(page, tmp_path):
    page.write_text("A page.\n\n```python\nraise ValueError('here')\n```\n")
    with pytest.raises(ValueError, match="here") as caught:
        compare_outputs(page, tmp_path)
    assert caught.traceback[-1].lineno + 1 == 4
