"""Of the site: the pages in benchmarks/results belong to it too."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path("benchmarks/results")


def on_files(files: Files, config: Any) -> Files:
    for path in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("images/*.png")]):
        files.append(File.generated(config, str(path), abs_src_path=str(path.resolve())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ in the repository stay inside the site."""
    return markdown.replace(f"](../{RESULTS}/", f"]({RESULTS}/")
