"""Achievable rates: the usual shares of a GPU's peak rates, or what was measured on such a GPU."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from command_line import refused

from zerojax.doctor import device_rates, slowdown
from zerojax.gpus.devices import Device, Rates, Topology, kind_of
from zerojax.planning.compiled_plan import CompiledStep, read_plan
from zerojax.planning.fit import SearchSpace

MEASURED = {"device": "NVIDIA H200", "products": {"bf16": 7e14}, "memory": 4e12, "link": 3.5e11, "slowdown": 0.25}


H200 = Topology.parse("h200:8")


@pytest.mark.parametrize(("kind", "bf16", "link"), [("h200", 794.5e12, 360e9), ("b200", 1745e12, 720e9)])
def test_usual_rates_are_published_shares_of_the_peak(kind, bf16, link):
    gpus = Topology.parse(f"{kind}:8")
    peak, usual = Device.of(gpus), Rates().of(gpus)
    assert usual.rates["bf16"] == pytest.approx(bf16, rel=1e-3)
    assert (usual.link, usual.network) == (pytest.approx(link), pytest.approx(40e9))
    assert (usual.bandwidth, usual.memory, usual.slowdown, peak.slowdown) == (peak.bandwidth, peak.memory, 0.35, 0)
    assert f"usual rates of {kind}" in Rates().described(kind)


def test_what_the_doctor_measured_replaces_the_usual_rates(tmp_path):
    file = tmp_path / "doctor.json"
    values = MEASURED | {"host_link": 4e10}
    found = [{"name": name, "result": "", "ok": True, "measured": {name: value}} for name, value in values.items()]
    file.write_text(json.dumps([{"name": "python", "result": "3.13", "ok": True}, *found]))
    given = Rates.parse(file)
    device, usual = given.of(H200), Rates().of(H200)
    assert (device.rates["bf16"], device.rates["f32"]) == (7e14, usual.rates["f32"])
    assert (device.bandwidth, device.link, device.network, device.slowdown) == (4e12, 3.5e11, usual.network, 0.25)
    assert (device.host_link, usual.host_link, device.disk) == (4e10, 5e10, math.inf)
    said = given.described("h200")
    assert said.startswith("Achievable rates were measured on NVIDIA H200: products, memory, link, slowdown.")
    assert said.endswith("Usual: network 80% of peak.")


def test_a_dict_without_a_device_is_of_the_topologys_gpu():
    given = Rates.parse({"link": 2e11, "network": 1e10, "host_link": 2e10, "disk": 3e9})
    device = given.of(H200)
    assert (device.link, device.network, device.host_link, device.disk) == (2e11, 1e10, 2e10, 3e9)
    assert given.described("h200").startswith("Achievable rates are given: link, network. Usual: products 80% of peak")


def test_a_plan_prints_both_times_and_which_rates_it_uses():
    compiled = jax.jit(lambda x: x @ x).lower(jnp.zeros((512, 512), jnp.float32)).compile()
    rates = Rates.parse(MEASURED | {"products": {"f32": 1e12}})
    found = read_plan(CompiledStep(compiled), "h200:1", batch=None, rates=rates)
    assert found.expected.roofline.products == pytest.approx(2 * 512**3 / 1e12)
    assert found.expected_seconds == found.expected.seconds == pytest.approx(2 * 512**3 / 1e12)
    assert found.roofline.products == pytest.approx(2 * 512**3 / 494.7e12, rel=1e-3)
    assert found.to_dict()["expected"]["seconds"] == found.expected.seconds
    (row,) = (line.split() for line in found.details.splitlines() if line.startswith("  matrix products"))
    assert row == ["matrix", "products", "0.543", "us", "268", "us"]
    assert "measured on NVIDIA H200" in found.details


def test_a_fit_compares_at_peak_rates_or_at_those_that_were_measured():
    space = lambda given: SearchSpace("h200", (3,), (None,), (8,), None, given)
    assert space(Rates()).device(8) == Device.of(H200)
    for given in (Rates.parse(MEASURED), Rates.parse({"link": 1e9})):
        assert space(given).device(8) == given.of(H200)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (MEASURED | {"speed": 1}, "unknown rate: speed. Known are device, products"),
        (MEASURED | {"device": 200}, "device must be a name such as 'NVIDIA H200', not 200"),
        (MEASURED | {"link": 0}, "link must be a number above 0, per second, not 0"),
        (MEASURED | {"products": 7e14}, "products must be FLOP/s by type"),
        (MEASURED | {"products": {"f32": 1, "bf16": -1}}, "products bf16 must be a number above 0, per second, not -1"),
        (MEASURED | {"products": {"bfloat16": 7e14}}, "products name bfloat16, a type without .*Known are .*bf16"),
        (MEASURED | {"slowdown": -0.1}, "slowdown must be a share of a product's time, such as 0.35, not -0.1"),
        (MEASURED | {"device": "cpu"}, "measured on 'cpu', and this plan is for h200"),
        (MEASURED | {"link": 9e11}, "link is 9e.11 per second, and the peak rate of h200 is 4.5e.11"),
        (7e14, "must be a path or a dict of measured rates, not a float"),
        ("nowhere.json", "rates='nowhere.json' cannot be read: No such file"),
        (__file__, "is not JSON"),
    ],
)
def test_wrong_rates_are_refused_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        Rates.parse(given).of(H200)


def test_the_command_refuses_rates_before_it_runs_the_file(tmp_path):
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps([{"name": "devices", "result": "", "ok": True, "measured": {"device": "cpu"}}]))
    said = refused("plan", "nowhere.py", "--rates", file)
    assert "has no measured rates. Write the file with `zerojax doctor --json`" in said


@pytest.mark.parametrize(("measured", "said"), [({"link": 1e9}, "does not name the device"), ({}, "no measured rates")])
def test_a_file_names_its_device_and_has_rates(tmp_path, measured, said):
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps([{"name": "x", "result": "", "ok": True, "measured": measured}]))
    with pytest.raises(ValueError, match=said):
        Rates.parse(file)


@pytest.mark.slow
def test_rates_are_measured_on_any_number_of_devices(monkeypatch):
    three = jax.local_devices()[:3]  # three do not divide a power of two
    monkeypatch.setattr(jax, "local_devices", lambda: three)
    text, measured = device_rates()
    assert measured.keys() - {"slowdown"} == {"products", "memory", "link"}, text


def test_the_slowdown_is_what_products_lose_of_a_gathers_time():
    """Products of 10 s, of which 2 s run beside a gather at 3/4 of their speed, take 10.5 s."""
    assert slowdown(10, 2, 10.5) == pytest.approx(1 / 3)
    assert slowdown(10, 2, 9.9) == 0
    assert slowdown(10, 2, 12) is None  # one after the other


def test_a_gpu_is_known_by_the_name_that_jax_gives_it():
    kinds = {"NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA B200": "b200", "cpu": None}
    assert {name: kind_of(name) for name in kinds} == kinds
