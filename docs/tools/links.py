"""A mkdocs hook: pages link to files of the repository, which are not part of the site."""

import os
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\((\.\.?/[^)#\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links that leave the docs folder to the repository; without `repo_url` only their text remains."""
    docs = Path(config.docs_dir).resolve()

    def replace(link: re.Match) -> str:
        target = Path(os.path.normpath(docs / Path(page.file.src_uri).parent / link[2]))
        if target.is_relative_to(docs):
            return link[0]
        path = target.relative_to(docs.parent).as_posix()
        return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else link[1]

    return _LINK.sub(replace, markdown)
