"""One process with eight devices and four with two train to the same numbers, and read each other's checkpoints."""

import json

import numpy as np
import pytest
import several

LAYOUTS = {"1x8": (), "4x2": ("1x8",), "again": ("4x2",)}  # which others' are restored
STEPS, SAVED = 20, 15


def run(folder, name, others):
    """What the first process of a layout said, by stage and view."""
    processes = {"4x2": 4}.get(name, 1)
    args = [processes, folder / name, *(folder / other for other in others)]
    how = {"processes": processes, "devices": 8 // processes, "flags": "--xla_backend_optimization_level=0"}
    printed = several.run("process_layouts_child.py", *args, **how)
    said = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out in printed]
    assert all(lines == said[0] for lines in said), "the processes do not say the same"
    return {line["name"]: line for line in said[0]}


@pytest.mark.slow
def test_every_layout_trains_alike_and_goes_on_from_the_others_checkpoints(tmp_path):
    found = {name: run(tmp_path, name, others) for name, others in LAYOUTS.items()}
    assert list(found["1x8"]) == ["global-3", "device-1"]
    for name, one in found["1x8"].items():
        assert len(one["losses"]) == STEPS
        assert one["losses"][-1] < 0.9 * one["losses"][0]
        several = found["4x2"][name]  # the same programs on the same devices; gloo sums in another order
        np.testing.assert_allclose(several["losses"], one["losses"], rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(several["weights"], one["weights"], rtol=1e-5, err_msg=name)
    losses = found["1x8"]["global-3"]["losses"][SAVED:]
    for layout, others in LAYOUTS.items():
        restored = found[layout]["global-3"]["restored"]
        assert set(restored) == set(others)
        for other, again in restored.items():
            np.testing.assert_allclose(again, losses, rtol=2e-6, err_msg=f"{layout} from {other}")
