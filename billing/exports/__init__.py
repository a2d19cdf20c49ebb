"""Files for other people's programs: usage row by row, and costs in the FOCUS format; CSV or Parquet, streamed."""

from billing.exports.focus import View, export_focus
from billing.exports.sheets import Format
from billing.exports.usage import export_usage

__all__ = ["Format", "View", "export_focus", "export_usage"]
