"""The page at `/`: one static file, which loads nothing and runs only its own script."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response


def endpoint() -> Callable[[Request], Awaitable[Response]]:
    """Serves the page. It needs no key, as it has no secrets and asks for the key itself."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # The policy names the only script and the only style by their hashes.
    script, style = (_hash(html, tag) for tag in ("script", "style"))
    headers = {
        "content-security-policy": (
            f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def page(request: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return page


def _hash(html: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
