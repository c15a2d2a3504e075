"""Forged DeepSpeed configurations: no text of a file becomes code, and no value that is nonsense is taken."""

import ast
import json
import math
import re

import optax
import pytest
from typer.testing import CliRunner

from zerojax import from_deepspeed
from zerojax.cli import app
from zerojax.deepspeed.keys import KEYS

CODE = "\nimport os; os.environ['FORGED'] = '1'\n"
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def at(path, value):
    """A configuration with a value at a path, given as a tuple of keys."""
    for part in reversed(path):
        value = {part: value}
    return value


def merged(a, b):
    if not isinstance(b, dict):
        return b
    both = {key: merged(a[key], b[key]) for key in a.keys() & b.keys() if isinstance(a[key], dict)}
    return a | b | both


def configured(path, value):
    base = {"optimizer": ADAMW}
    if path[0] == "scheduler":
        base["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}
    if path[0] == "fp16":
        base["fp16"] = {"enabled": True}
    if path[:2] == ("zero_optimization", "offload_optimizer"):
        base["zero_optimization"] = {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    return merged(base, at(path, value))


@pytest.mark.parametrize(
    "path",
    [
        (f"seed{CODE}",),
        ("optimizer", "params", f"lr{CODE}"),
        ("scheduler", "params", f"x{CODE}"),
        ("zero_optimization", f"stage\r{CODE}"),
        ("wandb\u2028import os",),
        ("optimizer", "params", "lr)#"),
        ("optimizer.params.lr",),
        ("fp16.enabled",),
        ("",),
        ("zero_optimization", "offload_optimizer", "device "),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("optimizer", [None, "optax.sgd(0.1)"])
def test_a_key_never_becomes_code(path, optimizer):
    with pytest.raises(ValueError, match=r"is no key of DeepSpeed|one key with a dot"):
        from_deepspeed(merged({"optimizer": ADAMW}, at(path, 1)), optimizer=optimizer)
    if len(path) == 1:
        with pytest.raises(ValueError, match=r"is no key of DeepSpeed|\.params"):
            from_deepspeed({"optimizer": ADAMW}, auto={path[0]: True, ".params": 1}, optimizer=optimizer)


@pytest.mark.parametrize("text", [CODE, '"""', "'", "\\", "\r#\u2028\x85", "\ud800", '") + exit("'], ids=ascii)
def test_a_value_is_printed_as_data(text):
    offload = {"device": "nvme", "nvme_path": f"/tmp/{text}"}
    config = {"optimizer": ADAMW, "zero_optimization": {"stage": 1, "offload_optimizer": offload}}
    config |= {"aio": {text: [text]}, "wandb": {"team": text}, "seed": text}
    found = from_deepspeed(config)
    tree = ast.parse(str(found))
    kinds = [type(node) for node in tree.body]
    assert kinds == [ast.Import, ast.Import, ast.ImportFrom, *[ast.Assign] * 4]
    assert found.options["offload"].path == offload["nvme_path"]
    printed = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert offload["nvme_path"] in printed


NONSENSE = [
    (("zero_optimization", "stage"), [math.nan, 2.7, True, 7, -1, "3", None, [2], {"stage": 2}, 10**400]),
    (("gradient_accumulation_steps",), [2.5, 0, -4, True, "2", math.inf]),
    (("train_batch_size",), [0, 1e400, 3.25]),
    (("optimizer", "params", "lr"), [None, math.nan, -1e-3, "3e-4", True, 10**400, [1e-3], -math.inf]),
    (("optimizer", "params", "betas"), [[0.9, 0.99, 0.999], [0.9], 0.9, [0.9, 1.0], ["0.9", 0.99], [-0.1, 0.9], None]),
    (("optimizer", "params", "weight_decay"), ["0", -0.1, False]),
    (("optimizer", "params", "adam_w_mode"), ["false", 0]),
    (("optimizer", "type"), [5, "", ["Adam"]]),
    (("optimizer",), ["AdamW", [1], True]),
    (("scheduler", "params", "warmup_num_steps"), [1.5, -1, "10"]),
    (("scheduler", "params", "total_num_steps"), [0, None, math.nan]),
    (("scheduler", "params", "warmup_type"), [True, "cosine", ["log"]]),
    (("fp16", "enabled"), ["false", 1, None, "auto "]),
    (("fp16", "initial_scale_power"), [5000, -1, 1.5, "16"]),
    (("fp16", "min_loss_scale"), [0, 1e30, math.nan]),
    (("fp16", "loss_scale"), [-1, 1e39, True]),
    (("bf16",), [True, "enabled"]),
    (("bf16", "enabled"), ["true", 7]),
    (("gradient_clipping",), [-1, math.nan, True, "1", None]),
    (("zero_optimization", "zero_hpz_partition_size"), [0, 2.5, True, "4"]),
    (("zero_optimization", "zero_quantized_weights"), ["int8", 1]),
    (("zero_optimization", "stage3_param_persistence_threshold"), [-1, 0.5, True]),
    (("zero_optimization", "offload_optimizer", "device"), ["CPU", True, 0]),
    (("zero_optimization", "offload_optimizer", "nvme_path"), ["", "a\0b", 3, ["/tmp"]]),
    (("zero_optimization", "offload_optimizer", "ratio"), [1.5, -0.1, True]),
    (("zero_optimization", "offload_optimizer"), ["cpu", ["cpu"]]),
    (("communication_data_type",), ["int8", 16, "jnp.float16"]),
    (("wandb",), [math.nan, {"x": [math.inf]}, {1: 2}, {"x": object()}]),
]


@pytest.mark.parametrize(("path", "values"), NONSENSE, ids=lambda x: ".".join(x) if isinstance(x, tuple) else "")
def test_nonsense_is_refused_with_the_path_and_the_value(path, values):
    for value in values:
        with pytest.raises(ValueError) as caught:
            from_deepspeed(configured(path, value))
        told = str(caught.value)
        assert path[-1] in told, (value, told)
        assert "Give" in told or "no key" in told or "keys of JSON" in told, told


def test_what_means_a_number_is_taken():
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1, "betas": (0, 0.5)}}, "gradient_clipping": 0}
    config["zero_optimization"] = {"stage": 2.0, "stage3_param_persistence_threshold": 1e5, "reduce_bucket_size": 5e8}
    found = from_deepspeed(config | {"train_batch_size": None})
    assert found.options == {"stage": 2, "persist_below": 100_000}
    assert "optax.adamw(1.0, b1=0.0, b2=0.5" in found.source


def test_every_mapped_key_has_a_rule():
    for name, key in KEYS.items():
        if key.fate == "mapped":
            assert key.rule.what != "any JSON value", name


FILES = {
    "empty": (b"", "Give a file of JSON"),
    "prose": (b"stage: 3", "Give a file of JSON"),
    "cut": (b'{"zero_optimization": {"stage": 3', "Give a file of JSON"),
    "nan": (b'{"gradient_clipping": NaN}', "NaN is no JSON number"),
    "twice": (b'{"seed": 1, "seed": 2}', '"seed" is given twice'),
    "binary": (b"\xff\xfe\x00\x01", "Give a file of JSON"),
    "deep": (b'{"aio":' * 50_000 + b"1" + b"}" * 50_000, "more than 32 levels"),
    "deep lists": (b'{"aio": ' + b"[" * 100 + b"]" * 100 + b"}", "more than 32 levels"),
    "digits": (b'{"seed": ' + b"9" * 5000 + b"}", "Give a file of JSON"),
    "list": (b"[1]", "is a JSON object, not a list"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration_is_one_line(name, tmp_path):
    file = tmp_path / "ds.json"
    file.write_bytes(FILES[name][0])
    done = CliRunner().invoke(app, ["deepspeed", str(file)])
    assert done.exit_code == 2
    assert FILES[name][1] in done.output
    assert done.output.count("\n") == 1


def test_a_configuration_that_contains_itself_is_refused():
    config = {"optimizer": ADAMW}
    config["aio"] = config
    with pytest.raises(ValueError, match="more than 32 levels"):
        from_deepspeed(config)


def test_settings_of_the_command_are_json(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("\ufeff" + json.dumps({"optimizer": ADAMW, "seed": 1}), encoding="utf-8")
    for setting in ("scheduler.type=WarmupLR", "optimizer.params.lr", "optimizer.params.lr=0.1\nimport os"):
        done = CliRunner().invoke(app, ["deepspeed", str(file), "--auto", setting])
        assert done.exit_code == 2
        assert "is no PATH=VALUE" in done.output
    done = CliRunner().invoke(app, ["deepspeed", str(file), "--auto", 'optimizer.params={"lr": 0.5}'])
    assert "optax.adamw(0.5" in done.output, done.output


def test_settings_that_are_blocks():
    loco = "zero_optimization.zeropp_loco_param"
    with pytest.raises(ValueError, match="Give zero_quantized_gradients too"):
        from_deepspeed({"optimizer": ADAMW}, auto={loco: {"err_beta": 0.8}})


def test_an_optimizer_given_as_text_is_evaluated_without_exec():
    text = "optax.chain(optax.clip(2 ** -1), optax.sgd(learning_rate=optax.linear_schedule(1e-1, 0.0, 10)),)"
    found = from_deepspeed({"gradient_clipping": 0}, optimizer=text)
    update, _ = found.optimizer.update(3.0, found.optimizer.init(1.0), 1.0)
    assert float(update) == pytest.approx(-0.05)
    for code in ("__import__('os').getcwd()", "optax.adamw.__globals__", "(lambda: optax.sgd(1.0))()", "optax.sgd(*x)"):
        found = from_deepspeed({}, optimizer=code)
        assert "optimizer = " in found.source
        with pytest.raises(ValueError, match="Build the transformation in Python"):
            _ = found.optimizer
    for code in ("optax.sgd(1)\nimport os", "import os", "x = 1", ""):
        with pytest.raises(ValueError, match="is no Python expression"):
            from_deepspeed({}, optimizer=code)
    with pytest.raises(TypeError, match="as a string"):
        from_deepspeed({}, optimizer=optax.sgd(1.0))


@pytest.mark.parametrize("devices", [0, -8, "8", 2.0, True])
def test_a_number_of_devices_is_a_count(devices):
    with pytest.raises((TypeError, ValueError), match="devices counts data-parallel workers"):
        from_deepspeed({"optimizer": ADAMW}, devices=devices)


def test_rows_must_divide_into_microbatches():
    config = {"optimizer": ADAMW, "train_batch_size": 10, "gradient_accumulation_steps": 4}
    with pytest.raises(ValueError, match=re.escape("train_batch_size=10 cannot be divided into 4 equal microbatches")):
        from_deepspeed(config)
