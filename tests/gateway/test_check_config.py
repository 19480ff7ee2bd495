"""Mistakes in a configuration file, as the real command reports them: all in one run, each with its line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from suimon.gateway.toml_lines import TomlLines

QUIET = {name: value for name, value in os.environ.items() if not name.startswith(("SUIMON_", "OTEL_"))}

EIGHT = """\
# Eight mistakes.
prot = 8001
port = 70000
log_level = "loud"

[[api_keys]]
name = "alice"
key = "canary-key-5d1c"
sha = "x"

[[models]]
backend = "echo"
served_model_name = "small"
fallback = ["large"]
routing = "random"

[[models]]
backend = "echo"
served_model_name = "large"
aliases = [
  "small",
]
fallback = ["smal", "huge"]
replicas = 0
"""


def suimon(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "suimon.gateway.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=QUIET)


def mistakes(tmp_path: Path, text: str, command: str = "check-config") -> list[str]:
    """What the command says of the file, without what every line begins with."""
    path = tmp_path / "suimon.toml"
    path.write_text(text, encoding="utf-8")
    result = suimon(command, "--config", str(path))
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    begin = f"suimon: error: {path}:"
    lines = result.stderr.splitlines()
    assert all(line.startswith(begin) for line in lines), result.stderr
    return [line.removeprefix(begin) for line in lines]


@pytest.mark.parametrize("command", ["check-config", "serve"])
def test_every_mistake_is_reported_at_once_with_line_key_and_remedy(tmp_path: Path, command: str) -> None:
    assert mistakes(tmp_path, EIGHT, command) == [
        "2: prot: unknown key; did you mean 'port'?",
        "3: port: expected int <= 65535, got 70000; correct it or leave it out (default: 8000)",
        "4: log_level: expected one of debug, info, warning, error, got 'loud'; correct it or leave it out "
        "(default: info)",
        "9: api_keys[0].sha: unknown key; did you mean 'sha256'?",
        "15: models[0].routing: expected one of least_loaded, prefix, got 'random'; correct it or leave it out "
        "(default: least_loaded)",
        "20: models[1].aliases[0]: expected a name of its own, but models[0].served_model_name is 'small' too; give "
        "this model another alias",
        "23: models[1].fallback[0]: expected the name of another model, got 'smal'; did you mean 'small'?",
        "23: models[1].fallback[1]: expected the name of another model, got 'huge'; named here: large, small",
        "24: models[1].replicas: expected int >= 1, got 0; correct it or leave it out (default: 1)",
    ]


def test_what_plugins_refuse_is_told_with_what_is_wrong_by_itself(tmp_path: Path) -> None:
    text = (
        "prot = 1\n"
        '[[models]]\nbackend = "native"\nblock_size = 17\ndtype = "int3"\n'
        '[[models]]\nbackend = "echo"\noptions = 3\n'
        '[[models]]\nbackend = "echo"\nserved_model_name = "e"\nfallback = ["nobody"]\noptions = {dealy = 1}\n'
    )
    unknown, block_size, dtype, options, fallback, dealy = mistakes(tmp_path, text)
    assert unknown.startswith("1: prot: ")
    assert block_size.startswith("4: models[0].block_size: ") and "a power of two, got 17" in block_size
    assert dtype.startswith("5: models[0].dtype: ")
    assert options.startswith("8: models[1].options: expected table, got 3")
    assert fallback.startswith("12: models[2].fallback[0]: ")  # of which the registering says nothing more
    assert dealy.startswith("13: models[2].options: ") and "'dealy'" in dealy


def test_a_list_where_one_value_belongs_is_a_mistake(tmp_path: Path) -> None:
    text = (
        'plugins_dir = ["a"]\napi_key_file = ["a"]\nport = [1]\n[[models]]\nserved_model_name = ["a"]\ndtype = ["a"]\n'
        'max_model_len = [1]\noptions = ["a"]\n[[models]]\noptions = [1]\nbackend = []\n'
    )
    said = mistakes(tmp_path, text)
    places = [line.split(": expected ")[0] for line in said]
    assert places == [
        *("1: plugins_dir", "2: api_key_file", "3: port", "5: models[0].served_model_name", "6: models[0].dtype"),
        *("7: models[0].max_model_len", "8: models[0].options", "10: models[1].options", "11: models[1].backend"),
    ]
    assert all(", got array; correct it or leave it out" in line for line in said), said


def test_a_circle_of_fallbacks_is_spelled_out(tmp_path: Path) -> None:
    tables = [("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("e", "e")]
    text = "".join(f'[[models]]\nserved_model_name = "{name}"\nfallback = ["{other}"]\n' for name, other in tables)
    assert mistakes(tmp_path, text) == [
        "9: models[2].fallback: goes in a circle, a -> b -> c -> a; take one of them out",
        "15: models[4].fallback: goes in a circle, e -> e; take one of them out",
    ]


def test_two_models_of_one_name_and_an_alias_given_twice(tmp_path: Path) -> None:
    text = '[[models]]\nmodel = "m"\n[[models]]\nserved_model_name = "m"\naliases = ["x", "x"]\n'
    assert mistakes(tmp_path, text) == [
        "4: models[1].served_model_name: expected a name of its own, but models[0].model is 'm' too; give this model "
        "another served_model_name",
        "5: models[1].aliases[1]: expected a name of its own, but models[1].aliases is 'x' too; give this model "
        "another alias",
    ]


@pytest.mark.parametrize("command", ["check-config", "serve"])
def test_what_the_plugins_refuse_of_several_models_has_lines_too(tmp_path: Path, command: str) -> None:
    text = (
        'port = 0\n[[models]]\nbackend = "native"\n\nblock_size = 17\n'
        '[[models]]\nbackend = "echo"\nserved_model_name = "e"\n[models.options]\ndealy = 1\n'
        '[[models]]\nbackend = "nonesuch"\n'
        '[[models]]\nbackend = "echo"\n'
    )
    block_size, option, backend = mistakes(tmp_path, text, command)
    assert block_size.startswith("5: models[0].block_size: ") and "a power of two, got 17" in block_size
    assert option.startswith("9: models[1].options: ") and "'dealy'" in option
    assert backend.startswith("11: models[2]: ") and "'nonesuch'" in backend


@pytest.mark.parametrize("command", ["check-config", "serve"])
def test_names_that_only_the_backends_tell_have_lines_too(tmp_path: Path, command: str) -> None:
    two = 'port = 0\n[[models]]\nbackend = "echo"\n[[models]]\nbackend = "echo"\naliases = ["y"]\n'
    (said,) = mistakes(tmp_path, two, command)
    assert said == (
        "4: models[1].served_model_name: two backends serve the model 'echo': give one another served_model_name or "
        "alias"
    )
    fallback = 'port = 0\n[[models]]\nbackend = "echo"\nmodel = "x/m.gguf"\n[[models]]\nbackend = "echo"\n'
    (said,) = mistakes(tmp_path, fallback + 'served_model_name = "b"\nfallback = [\n"m.gguf"]\n', command)
    assert said.startswith("8: models[1].fallback[0]: model 'b': fallback 'm.gguf' is not a served model")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('host = "a"\nhost = "b"', "2: is not valid TOML: "),
        ("port = 1\nmodels = [", "2: is not valid TOML: "),
        ("dtype = 'float32'", "1: dtype: unknown key; it belongs in a [[models]] table"),
        ("[[models]]\ndrain_timeout = 3", "2: models[0].drain_timeout: unknown key; it belongs at the top of the file"),
        ("access_log = 1", "1: access_log: expected bool, got 1; "),
        ("port = true", "1: port: expected int, got true; "),
        ("[[models]]\noptions = 3", "2: models[0].options: expected table, got 3; "),
        ("[[models]]\naliases = 'a'", "2: models[0].aliases: expected array, got 'a'; "),
        ("[[models]]\nseed = [1]", "2: models[0].seed: expected int, got array; "),
    ],
)
def test_one_mistake_at_its_line(tmp_path: Path, text: str, said: str) -> None:
    (line,) = mistakes(tmp_path, text)
    assert line.startswith(said), line


def test_no_key_is_ever_shown(tmp_path: Path) -> None:
    text = 'api_keys = ["canary-1"]\nhost = "0.0.0.0"\n'
    assert mistakes(tmp_path, text) == ["1: api_keys[0]: expected table, got str; correct it or take it out"]
    text = '[[api_keys]]\nkey = 93847\nsha256 = "canary-2"\nnaem = "canary-3"\n'
    lines = mistakes(tmp_path, text)
    assert [line.split(";")[0] for line in lines] == [
        "2: api_keys[0].key: expected str",
        "4: api_keys[0].naem: unknown key",
    ]
    assert not re.search("canary|93847", " ".join(lines))


def test_wrong_flags_are_told_with_the_mistakes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "suimon.toml"
    path.write_text("prot = 1\n", encoding="utf-8")
    result = suimon("check-config", "--config", str(path), "--header-timeout", "0")
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first.endswith(":1: prot: unknown key; did you mean 'port'?")
    assert second == "suimon: error: --header-timeout: expected float > 0.0"


@pytest.mark.parametrize("uncommented", [False, True])
def test_the_example_file_is_accepted_by_the_command(tmp_path: Path, uncommented: bool) -> None:
    """As it is, and with every model that it keeps in comments."""
    text = (Path(__file__).resolve().parents[2] / "deploy" / "suimon.example.toml").read_text(encoding="utf-8")
    head, models = text.split("[[models]]", 1)
    if uncommented:
        models = re.sub(r"(?m)^# (\[|\w+ = (?!\"ELSEWHERE))", r"\1", models)
    path = tmp_path / "suimon.toml"
    path.write_text(f"{head}[[models]]{models}", encoding="utf-8")
    result = suimon("check-config", "--config", str(path))
    assert (result.returncode, result.stderr) == (0, "")
    shown = json.loads(result.stdout)["models"]
    backends = ["native", "openai_remote"] + ["llama_cpp"] * uncommented
    assert [model["backend"] for model in shown][: len(backends)] == backends
    assert len(shown) == 2 + 2 * uncommented
    assert (shown[0]["replicas"], shown[0]["routing"], shown[0]["fallback"]) == (2, "prefix", ["elsewhere"])


# --- Lines ------------------------------------------------------------------------------------------------------------

TOML = '''\
a = 1  # [[x]] = "
"b.c" = """
[[models]]
'd' = 2 \\""""
d.e = [ # ]
  "]", {f = 3},
]
e = \'\'\'
# [[models]]
""""\'\'\'
[[models]]
name = '[['
[models.options]
z = { y = "#}" }
[[ "models" ]]
[models.options]
deep.er = 1
[[models.list]]
p = 1
[[models.list]]
p = 2
[t]
u = 1'''


@pytest.mark.parametrize("text", [TOML, TOML.replace("\n", "\r\n")])
def test_lines_of_keys_whatever_stands_between_them(text: str) -> None:
    content = tomllib.loads(text)
    assert len(content["models"]) == 2 and content["models"][1]["list"] == [{"p": 1}, {"p": 2}]
    expected = {
        ("a",): 1,
        ("b.c",): 2,
        ("d", "e", 1, "f"): 5,
        ("e",): 8,
        ("models", 0): 11,
        ("models", 0, "name"): 12,
        ("models", 0, "options", "z", "y"): 14,
        ("models", 1): 15,
        ("models", 1, "options"): 16,
        ("models", 1, "options", "deep", "er"): 17,
        ("models", 1, "list", 0, "p"): 19,
        ("models", 1, "list", 1, "p"): 21,
        ("t", "u"): 23,
        ("t", "nothing"): 22,  # what has no line is where it would stand
        ("nothing",): 1,
    }
    lines = TomlLines(text)
    assert {path: lines.of(path) for path in expected} == expected


def test_every_key_has_the_line_that_it_was_written_on() -> None:
    """Generated: values of every kind between the keys, and the keys say where they are."""
    values = ["1", '"#"', "'\"'", '"""\n[x]\n"""', "'''\n''\n'''", "[\n1, # ]\n2]", '{a = "}", b = [1]}', "1979-05-27"]
    text, line = "", 1
    for number in range(200):
        value = values[number * 7 % len(values)]
        text += f"key_{line} = {value}\n" if number % 9 else f"[table_{line}]\n"
        line = text.count("\n") + 1
    flat = {**tomllib.loads(text)}
    paths = [(name,) for name in flat] + [(t, k) for t, inner in flat.items() if t[0] == "t" for k in inner]
    lines = TomlLines(text)
    assert len(paths) == 200
    assert all(lines.of(path) == int(path[-1].split("_")[1]) for path in paths)
