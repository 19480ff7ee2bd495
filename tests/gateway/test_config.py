"""Settings: precedence, errors that name place and key, secrets, and the page that is made from the fields."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from suimon.core_engine.config import DTYPES, EngineConfig
from suimon.core_engine.loader.sources import DEFAULT_MODEL
from suimon.core_engine.request_queue import POLICIES
from suimon.gateway import config_file, config_options, config_sources
from suimon.gateway.config import ApiKey, ConfigError, ModelSettings, Settings, check_exposure, is_loopback
from suimon.gateway.config_file import Mistakes

ROOT = Path(__file__).resolve().parents[2]
KEY = "canary-key-7f3a"


def load(*flags: str, environ: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    config_sources.add_flags(parser)
    mistakes = Mistakes()
    settings = config_sources.read_settings(parser.parse_args(flags), environ or {}, mistakes)
    mistakes.raise_any()
    return settings


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "suimon.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def failure(*flags: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*flags, environ=environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- Precedence ----------------------------------------------------------------------------------------------


def test_without_any_source_the_defaults_hold() -> None:
    assert load() == Settings()


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'port = 1001\nlog_level = "error"\nheader_timeout = 3\n[[models]]\nseed = 1\nblock_size = 8\n'
    )
    environ = {"SUIMON_PORT": "1002", "SUIMON_LOG_LEVEL": "debug", "SUIMON_SEED": "2"}
    settings = load("--config", path, "--port", "1003", environ=environ)
    assert settings.port == 1003  # flag
    assert settings.log_level == "debug"  # environment
    assert settings.header_timeout == 3.0  # file
    assert settings.body_timeout == 30.0  # default
    assert settings.models[0].seed == 2
    assert settings.models[0].block_size == 8


def test_a_flag_given_twice_counts_once_the_last_time() -> None:
    assert load("--port", "1", "--port", "2").port == 2


def test_an_empty_variable_is_not_set() -> None:
    assert load(environ={"SUIMON_PORT": "", "SUIMON_API_KEY": ""}) == Settings()


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    assert load(environ={"SUIMON_CONFIG": write(tmp_path, "port = 77")}).port == 77


def test_flags_with_the_names_vllm_gives_them() -> None:
    flags = (
        "some/model --max-model-len 100 --max-num-seqs 3 --max-num-batched-tokens 64 --block-size 32 "
        "--no-enable-prefix-caching --served-model-name m --api-key a --api-key b --dtype float32 --seed 9 "
        "--allowed-origins http://a,http://b --chat-template t.jinja --scheduling-policy priority "
        "--kv-cache-memory-bytes 1GiB --num-gpu-blocks-override 12 --gpu-memory-utilization 0.25 --backend echo"
    )
    settings = load(*flags.split())
    assert settings.models == (
        ModelSettings(
            model="some/model",
            backend="echo",
            served_model_name="m",
            dtype="float32",
            max_model_len=100,
            block_size=32,
            num_blocks=12,
            kv_cache_memory=1024**3,
            memory_utilization=0.25,
            max_num_seqs=3,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            scheduling_policy="priority",
            seed=9,
            chat_template="t.jinja",
        ),
    )
    assert settings.allowed_origins == ("http://a", "http://b")
    assert [key.digest for key in settings.api_keys] == [hashlib.sha256(name).digest() for name in (b"a", b"b")]


@pytest.mark.parametrize("struct", [Settings, ModelSettings])
def test_every_option_is_read_from_flag_and_environment_alike(struct: type[msgspec.Struct]) -> None:
    """Each option on its own, so that a name which collides or is never read cannot hide."""
    samples = {"yes/no": "true", "integer": "7", "number": "0.25", "bytes": "1KiB", "list": "a,b", "text": "x"}
    special = {"host": "localhost", "api_keys": "k", "api_key_file": None, "log_level": "debug", "log_format": "json"}
    special |= {"dtype": "float32", "routing": "prefix", "scheduling_policy": "priority"}
    for name, option in config_options.options(struct).items():
        text = special.get(name, samples[config_options.type_word(option)] if option.flag else None)
        if text is None:
            continue
        assert option.flag is not None and option.env is not None
        flag = [option.flag, text] if option.name != "model" else [text]
        flag = [option.flag] if isinstance(option.default, bool) else flag
        by_flag, by_variable = load(*flag), load(environ={option.env: text})
        assert by_flag == by_variable, name
        holder: Any = by_flag if struct is Settings else by_flag.models[0]
        if not isinstance(option.default, bool) or not option.default:
            assert getattr(holder, name) != option.default, name


def test_standard_variable_for_message_content() -> None:
    name = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
    assert load(environ={name: "true"}).capture_message_content
    assert not load(environ={name: "true", "SUIMON_CAPTURE_MESSAGE_CONTENT": "false"}).capture_message_content


# --- Errors --------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_neighbour(tmp_path: Path) -> None:
    path = write(tmp_path, "prot = 1")
    assert failure("--config", path) == f"{path}:1: prot: unknown key; did you mean 'port'?"
    path = write(tmp_path, "[[models]]\n[[models]]\nmax_model_length = 1")
    said = f"{path}:3: models[1].max_model_length: unknown key; did you mean 'max_model_len'?"
    assert failure("--config", path) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('port = "80"', "port: expected int, got '80'"),
        ("port = 70000", "port: expected int <= 65535, got 70000; correct it or leave it out (default: 8000)"),
        ("header_timeout = 0", "header_timeout: expected float > 0.0"),
        ("header_timeout = nan", "header_timeout: expected float"),
        ("plugins = [1]", "plugins[0]: expected str, got 1"),
        ('max_body_size = "1 parsec"', "max_body_size: expected bytes such as"),
        ("models = 3", "models: expected one or more [[models]] tables"),
        ("models = []", "models: expected one or more [[models]] tables"),
        ("[[models]]\nblock_size = 0", "models[0].block_size: expected int >= 1"),
        ('[[api_keys]]\nname = "x"', "api_keys[0]: an API key needs either key or sha256"),
        ("port = ", "is not valid TOML"),
    ],
)
def test_a_wrong_value_names_file_key_and_expectation(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    message = failure("--config", path)
    assert message.startswith(path) and said in message


def test_wrong_flags_and_variables_are_named(tmp_path: Path) -> None:
    assert failure("--port", "abc") == "--port: expected int, got 'abc'"
    assert failure(environ={"SUIMON_MAX_NUM_SEQS": "-1"}) == "SUIMON_MAX_NUM_SEQS: expected int >= 1"
    said = "--log-level: expected one of debug, info, warning, error, got 'loud'"
    assert failure("--log-level", "loud") == said
    missing = str(tmp_path / "no.toml")
    assert failure("--config", missing) == f"{missing}: cannot be read: No such file or directory"


def test_model_flags_are_refused_when_the_file_has_several_models(tmp_path: Path) -> None:
    path = write(tmp_path, '[[models]]\nmodel = "a"\n[[models]]\nmodel = "b"\n')
    assert [model.model for model in load("--config", path).models] == ["a", "b"]
    message = failure("--config", path, "--dtype", "float32")
    assert "--dtype" in message and "2" in message and "[[models]]" in message
    assert "MODEL" in failure("--config", path, "c")


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("4GiB", 4 * 1024**3), ("1.5k", 1500), ("512M", 512 * 10**6), ("2 MiB", 2**21)]
)
def test_sizes(text: str, size: int) -> None:
    assert config_options.parse_size(text) == size


# --- Keys and exposure ---------------------------------------------------------------------------------------


def test_a_key_is_kept_as_its_digest_and_nowhere_else() -> None:
    settings = load("--api-key", KEY)
    assert settings.api_keys[0].digest == hashlib.sha256(KEY.encode()).digest()
    assert settings.api_keys[0].name == "key-" + hashlib.sha256(KEY.encode()).hexdigest()[:8]
    everything = f"{settings!r} {msgspec.json.encode(settings)!r} {settings.api_keys[0]}"
    assert KEY not in everything


def test_keys_from_tables_and_from_a_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"three").hexdigest()
    (tmp_path / "keys").write_text("# ours\none\nbob t#wo  # a comment\n\n", encoding="utf-8")
    path = write(
        tmp_path,
        f'api_key_file = "{tmp_path / "keys"}"\n[[api_keys]]\nname = "eve"\nsha256 = "{digest.upper()}"\n',
    )
    keys = load("--config", path).api_keys
    assert [key.sha256 for key in keys] == [digest, *(hashlib.sha256(k).hexdigest() for k in (b"one", b"t#wo"))]
    assert [key.name for key in keys] == ["eve", "key-" + hashlib.sha256(b"one").hexdigest()[:8], "bob"]


def test_a_bad_key_file_is_named_without_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"fine\nname {KEY} more\n", encoding="utf-8")
    message = failure("--api-key-file", str(file))
    assert "line 2" in message and KEY not in message
    assert "cannot be read" in failure("--api-key-file", str(tmp_path / "none"))


@pytest.mark.parametrize("wrong", [{}, {"key": "a", "sha256": "0" * 64}, {"sha256": "xyz"}])
def test_a_key_needs_one_source(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="API key"):
        ApiKey(**wrong)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    check_exposure(Settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.2", "example.org", "127.0.0.1.example.org"])
def test_other_addresses_need_a_key_or_a_word(host: str) -> None:
    message = failure("--host", host)
    assert "--allow-unauthenticated" in message and "SUIMON_API_KEY" in message
    load("--host", host, "--allow-unauthenticated")
    load("--host", host, "--api-key", "k")


# --- One declaration -----------------------------------------------------------------------------------------


def test_model_settings_are_the_engines_own_names_types_and_defaults() -> None:
    ours = {field.name: field for field in msgspec.structs.fields(ModelSettings)}
    engine = {field.name: field for field in dataclasses.fields(EngineConfig)}
    assert set(ours) - set(engine) == {"backend", "options", "aliases", "replicas", "routing", "fallback"}
    for name in ("executor", "executor_options"):  # who computes is the plugin's choice, not the operator's
        del engine[name]
    assert set(engine) <= set(ours)
    for name, field in engine.items():
        if field.default is not dataclasses.MISSING:
            assert ours[name].default == field.default, name
    EngineConfig(**{name: getattr(ModelSettings(model="m"), name) for name in engine})
    assert config_options.MODEL["dtype"].choices == DTYPES
    assert config_options.MODEL["scheduling_policy"].choices == tuple(POLICIES)
    assert config_file.DEMO_MODEL == DEFAULT_MODEL


def test_the_page_is_the_one_the_fields_make() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == config_sources.render_page(), "run: python -m suimon.gateway.config_sources > docs/configuration.md"


def test_the_page_has_every_field_with_a_meaning() -> None:
    page = config_sources.render_page()
    for struct in (Settings, ModelSettings):
        for option in config_options.options(struct).values():
            assert f"| `{option.name}` |" in page and len(option.doc) > 10


def test_the_example_file_is_accepted(tmp_path: Path) -> None:
    """As it is, and with the line about a file of keys taken out of its comment."""
    example = (ROOT / "deploy" / "suimon.example.toml").read_text(encoding="utf-8")
    assert load("--config", write(tmp_path, example)).host == tomllib.loads(example)["host"]
    keys = tmp_path / "keys"
    keys.write_text("k\n", encoding="utf-8")
    with_keys = example.replace('# api_key_file = "/run/secrets/suimon-keys"', f'api_key_file = "{keys}"')
    assert len(load("--config", write(tmp_path, with_keys)).api_keys) == 1
