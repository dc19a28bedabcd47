"""Options: the command line before the environment before the file; invalid ones are refused by name."""

from __future__ import annotations

import pytest

from megatron_infer.cli.main import main
from megatron_infer.errors import ConfigError
from megatron_infer.server.server_config import ServerConfig, read_config_file, server_config_from


def test_command_line_goes_before_environment_before_file(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("port: 1\nhost: 0.0.0.0\nmax_queue: 5\nmodel: smollm2\nengine: {max_requests: 8}\n")
    file, beside = read_config_file(str(path))
    environment = {
        "MEGATRON_INFER_PORT": "tcp://10.0.0.7:80",
        "MEGATRON_INFER_MAX_QUEUE": "6",
        "MEGATRON_INFER_LOG_REQUESTS": "0",
    }
    settings = server_config_from({"port": 3}, environment | {"MEGATRON_INFER_API_KEY": "k"}, file)
    assert (settings.port, settings.max_queue, settings.host, settings.api_key) == (3, 6, "0.0.0.0", "k")
    assert settings.log_requests is False and "'k'" not in repr(settings)
    assert beside == {"model": "smollm2", "engine": {"max_requests": 8}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "port is 70,000, it must be 0 to 65535"),
        ({"port": "x"}, r"port is 'x' \(str\), it must be an integer"),
        ({"api_key": " "}, "api_key is empty"),
        ({"api_key": 12345}, "api_key is what was given, expected str"),
        ({"control": True, "host": "0.0.0.0"}, "control at 0.0.0.0 needs an API key"),
        ({"weights_root": "/nowhere/at/all"}, "weights_root is '/nowhere/at/all', which is no directory"),
        ({"allow_origin": ["https://a.example/path"]}, "allow_origin is 'https://a.example/path'; an origin is like"),
        ({"control": True, "host": "127.evil.example"}, "control at 127.evil.example needs an API key"),
        ({"served_model_name": [1]}, "served_model_name is a name or a list of names"),
        ({"prometheus_metrics_mode": "launch_serve"}, "did you mean 'launch_server'"),
        ({"tool_call_parser": "hermess"}, "unknown tool_call_parser 'hermess'; did you mean 'hermes'"),
        ({"reasoning_parser": "deepseek"}, "unknown reasoning_parser"),
        ({"http_workers": 0}, "http_workers is 0"),
        ({"http_workers": 2, "control": True}, "leave http_workers at 1"),
    ],
)
def test_wrong_option_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**values)


def test_wrong_file_and_environment_are_named(tmp_path):
    path = tmp_path / "server.yaml"
    for text, message in (("prot: 1", "did you mean 'port'"), ("- 1", "NAME: VALUE"), ("a: [", "server.yaml")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config_file(str(path))
    with pytest.raises(ConfigError, match="MEGATRON_INFER_PORT is 'x', expected int"):
        server_config_from({}, {"MEGATRON_INFER_PORT": "x"}, {})


def test_command_reports_mistakes_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for arguments, message in (
        (["serve"], "no model: give MODEL"),
        (["serve", "smollm2", "--port", "99999"], "port is 99,999"),
        (["serve", "smollm2", "--tp", "2"], "torchrun --nproc-per-node 2 -m megatron_infer serve smollm2"),
        (["serve", "smollm2", "--tp", "2", "--prefill", "1", "--decode", "1"], "torchrun --nproc-per-node 4 -m"),
        (["serve", "smollm2", "--dp", "2", "--prefill", "1", "--decode", "1"], "dp is 2; leave dp out"),
        (["serve", "smollm2", "--prefill", "1"], "prefill is 1 and decode is 0"),
        (["serve", "smollm2", "--control", "--host", "0.0.0.0"], "control at 0.0.0.0 needs an API key"),
        (["serve", "smollm2", "--host", "192.0.2.1"], "cannot listen at 192.0.2.1 port 8000"),
        (["serve", "smollm2", "--dp", "0"], "dp is 0"),
        (["serve", "smollm2", "--threads", "0"], "threads is 0, it must be an integer of at least 1"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_ranks_of_torchrun_take_no_role_of_a_single_engine(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    role = ["--tp", "2", "--pipeline-role", "decode_only", "--zmq-endpoint-base", "tcp://127.0.0.1:1"]
    assert main(["serve", "smollm2", *role]) == 2
    assert "give --prefill and --decode in its place" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-requests", "4", "--threads", "1", "--dp", "2"], "--max-requests, --dp, --threads with --coordinator"),
        (["--zmq-endpoint-base", "ipc://base"], "--zmq-endpoint-base with --coordinator"),
    ],
)
def test_flags_without_effect_beside_a_coordinator_are_refused(flags, named, capsys):
    assert main(["serve", "smollm2", "--coordinator", "tcp://127.0.0.1:1", *flags]) == 2
    assert named in capsys.readouterr().err
