"""Static files: our style sheet, script and icon, and Plotly from its own wheel."""

import gzip
import importlib.resources
from functools import cache

from litestar import Response, get
from litestar.exceptions import NotFoundException

from dashboards.web.site import AnyRequest, static_path

MEDIA_TYPES = {
    "farthing.css": "text/css; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "farthing.svg": "image/svg+xml",
}
FOR_EVER = "public, max-age=31536000, immutable"  # addresses carry a version


@cache
def plotly_gzip() -> bytes:
    """`plotly.min.js` as the plotly wheel ships it, 4.8 MB, packed once to a third."""
    return gzip.compress(importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes(), 6)


@get("/static/plotly.js", sync_to_thread=True)
def plotly(request: AnyRequest) -> Response[bytes]:
    """Plotly, gzipped where the browser takes that."""
    packed = plotly_gzip()
    headers = {"cache-control": FOR_EVER, "vary": "accept-encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(gzip.decompress(packed), media_type="text/javascript; charset=utf-8", headers=headers)
    headers["content-encoding"] = "gzip"
    return Response(packed, media_type="text/javascript; charset=utf-8", headers=headers)


@get("/static/{name:str}", sync_to_thread=True)
def static(name: str) -> Response[bytes]:
    """One of our own files."""
    if name not in MEDIA_TYPES:
        raise NotFoundException("There is no such file.")
    return Response(static_path(name).read_bytes(), media_type=MEDIA_TYPES[name], headers={"cache-control": FOR_EVER})
