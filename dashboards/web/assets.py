"""Static files: our style sheet, script and icon, and Plotly from its own wheel."""

from litestar import Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from dashboards.web import plotly_js
from dashboards.web.site import AnyRequest, static_path

MEDIA_TYPES = {
    "farthing.css": "text/css",
    "charts.js": "text/javascript",
    "farthing.svg": "image/svg+xml",
}
FOR_EVER = "public, max-age=31536000, immutable"  # addresses carry a version


@get("/static/plotly.js", sync_to_thread=True)
def plotly(request: AnyRequest) -> Response[bytes]:
    """Plotly, gzipped where the browser takes that."""
    headers = {"cache-control": FOR_EVER, "vary": "accept-encoding"}
    body = plotly_js.source
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        body = plotly_js.packed
    return Response(body(), media_type=MEDIA_TYPES["charts.js"], headers=headers)


@get("/static/{name:str}", sync_to_thread=True)
def static(name: FromPath[str]) -> Response[bytes]:
    """One of our own files."""
    if name not in MEDIA_TYPES:
        raise NotFoundException("There is no such file.")
    return Response(static_path(name).read_bytes(), media_type=MEDIA_TYPES[name], headers={"cache-control": FOR_EVER})
