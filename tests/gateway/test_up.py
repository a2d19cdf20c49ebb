"""Which models `farthing up` serves, and what it writes into farthing.toml for those that are not in it."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import Settings
from gateway.up import Options, add_missing_models, chosen_roles, served_name

STARTER = (files("gateway") / "starter.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "configured", "small", "large"),
    [
        ({}, {}, "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"),
        ({"demo": True}, {"roles": {"small": "mine", "large": "mine"}}, "smollm2-135m", "qwen2.5-coder-0.5b"),
        ({}, {"roles": {"small": "mine"}}, "mine", "qwen2.5-coder-1.5b"),
        ({"demo": True, "large": "other"}, {}, "smollm2-135m", "other"),
        ({"small": "other"}, {"roles": {"small": "mine", "large": "big"}}, "other", "big"),
    ],
)
def test_the_options_win_over_the_configuration(
    given: dict[str, Any], configured: dict[str, Any], small: str, large: str
) -> None:
    none = {"small": None, "large": None, "demo": False, "database_url": None, "dtype": None, "engine": True}
    options = Options(data_dir=Path(), port=8000, **(none | given))
    assert chosen_roles(options, configured) == {"small": small, "large": large}
    if not given and not configured:
        assert chosen_roles(options, tomllib.loads(STARTER)) == {"small": small, "large": large}


def test_a_file_or_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "my.model.gguf").touch()
    (tmp_path / "folder.v2").mkdir()
    assert served_name(str(tmp_path / "my.model.gguf")) == "my.model"
    assert served_name(str(tmp_path / "folder.v2") + "/") == "folder.v2"
    assert served_name("qwen2.5-coder-0.5b") == "qwen2.5-coder-0.5b"


def test_a_model_that_is_not_configured_is_added_without_a_price(tmp_path: Path) -> None:
    config = tmp_path / "farthing.toml"
    config.write_text(STARTER, encoding="utf-8")
    served = {"small": 'odd "name".v1', "large": "qwen2.5-coder-1.5b"}
    for _ in range(2):
        add_missing_models(served, tomllib.loads(config.read_text(encoding="utf-8")), config)
    added = config.read_text(encoding="utf-8").removeprefix(STARTER)
    assert added.count("[models.") == 1
    found = tomllib.loads(STARTER + added)
    settings = Settings(
        **(found | {"roles": served, "database_url": "postgresql://x/x", "admin_key_hash": "0" * 64, "data_dir": "/x"})
    )
    assert settings.models[served["small"]].price is None
    assert [t.upstream for t in settings.models[served["small"]].upstreams] == ["engine"]
