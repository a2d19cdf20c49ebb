"""Plotly's own script, from the data of its Python wheel: no CDN, and a version that pip keeps."""

import gzip
import importlib.resources
import re
from functools import cache
from importlib.metadata import version

VERSION = version("plotly")

_STYLE_GUARD = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')


def source() -> bytes:
    """`plotly.min.js`, 4.8 MB."""
    return importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes()


@cache
def packed() -> bytes:
    """The source gzipped, to a third, once a process."""
    return gzip.compress(source(), 6)


@cache
def style_ids() -> list[str]:
    """Ids of style elements that the script adds to a page unless an element has that id already.

    They dress the maps bundled with it. Our content policy refuses inline styles, so pages put empty elements there.
    """
    return [each.decode() for each in dict.fromkeys(_STYLE_GUARD.findall(source()))]
