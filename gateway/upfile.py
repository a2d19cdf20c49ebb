"""`up.json`: what the last `farthing up` on a data folder printed, for scripts and for the other commands."""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class UpFile:
    """Holds secrets, so the file's mode is 0600. `database_url` is the libpq form, which psql takes too."""

    base_url: str
    api_key: str
    admin_key: str
    dashboard_url: str
    database_url: str
    engine_url: str = ""
    """Of its own engine, which is on another port at each start; empty where it has none."""

    @classmethod
    def read(cls, data_dir: Path) -> "UpFile | None":
        """None when there is none, or none that we could have written."""
        try:
            found = json.loads((data_dir / "up.json").read_text(encoding="utf-8"))
            return cls(**{field.name: str(found[field.name]) for field in fields(cls) if field.name in found})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, data_dir: Path) -> None:
        """Replace the file in one step: a reader sees the old one or the new one, never half of one."""
        draft = data_dir / "up.json.tmp"
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(data_dir / "up.json")


def default_data_dir() -> Path:
    """$FARTHING_DATA, else ~/.local/share/farthing."""
    named = os.environ.get("FARTHING_DATA")
    return Path(named) if named else Path.home() / ".local" / "share" / "farthing"
